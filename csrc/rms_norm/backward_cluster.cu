#include "../norm/backward_cluster.h"

namespace tch_extension::norm {

template bool start_backward_cluster<RmsNorm>(const NormBackward&, cudaStream_t);
template int64_t clusters_at_a_time<RmsNorm>(const NormPlan&, int32_t);

}  // namespace tch_extension::norm
