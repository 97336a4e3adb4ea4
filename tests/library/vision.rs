//! torchvision's operators.
