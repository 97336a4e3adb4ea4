#include "../norm/backward_in_place.h"

namespace tch_extension::norm {

template bool start_backward_in_place<RmsNorm>(const NormBackward&, cudaStream_t);

}  // namespace tch_extension::norm
