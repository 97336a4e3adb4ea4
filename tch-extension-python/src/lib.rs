//! Every operator of tch-extension, registered with libtorch's dispatcher.
