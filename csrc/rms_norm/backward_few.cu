#include "../norm/backward_few.h"

namespace tch_extension::norm {

template bool start_backward_few<RmsNorm>(const NormBackward&, cudaStream_t);

}  // namespace tch_extension::norm
