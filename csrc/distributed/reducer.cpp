// Data parallelism: the reduction of gradients during the backward pass, by c10d's Reducer.
#include "reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <unordered_map>

namespace tch_extension {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// The Ddp whose hook runs in this thread, which holds the Reducer's lock meanwhile.
thread_local const Ddp* in_hook = nullptr;

class InHook {
 public:
  explicit InHook(const Ddp* ddp) : before_(std::exchange(in_hook, ddp)) {}
  ~InHook() { in_hook = before_; }
  InHook(const InHook&) = delete;
  InHook& operator=(const InHook&) = delete;

 private:
  const Ddp* before_;
};

// A node between the model's outputs and the loss. It tells when the backward pass reaches them,
// and passes undefined gradients on, so that parameters of outputs that the loss does not use are
// ready, too.
class Sink final : public OwnNode {
 public:
  explicit Sink(std::shared_ptr<Ddp> ddp) : ddp_(std::move(ddp)) {}

  std::string name() const override { return "DdpSink"; }

  variable_list apply(variable_list&& grads) override {
    if (const auto ddp = ddp_) ddp->backward_begins();
    return std::move(grads);
  }

 protected:
  void free_own() noexcept override { ddp_.reset(); }

 private:
  std::shared_ptr<Ddp> ddp_;
};

// Keeps the Reducer alive for as long as a graph may need it.
class KeepAlive final : public torch::autograd::FunctionPreHook {
 public:
  explicit KeepAlive(std::shared_ptr<Ddp> ddp) : ddp_(std::move(ddp)) {}
  variable_list operator()(const variable_list& grads) override { return grads; }

 private:
  std::shared_ptr<Ddp> ddp_;
};

// The tensors that have a place in the graph.
std::vector<at::Tensor*> differentiable(std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor*> list;
  for (auto& output : outputs) {
    if (output.defined() && output.grad_fn()) list.push_back(&output);
  }
  return list;
}

// Adds the node after the outputs. They share memory and version counter with those before.
void pass_through(std::vector<at::Tensor>& outputs, const std::shared_ptr<Ddp>& ddp) {
  const auto list = differentiable(outputs);
  if (list.empty()) return;
  variable_list inputs;
  for (const auto* output : list) inputs.push_back(*output);
  auto node = make_node<Sink>(ddp);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (auto* output : list) {
    at::Tensor passed = output->detach();
    torch::autograd::set_history(passed, node);
    *output = std::move(passed);
  }
}

void keep_alive(std::vector<at::Tensor>& outputs, const std::shared_ptr<Ddp>& ddp) {
  for (const auto* output : differentiable(outputs)) {
    output->grad_fn()->add_pre_hook(std::make_unique<KeepAlive>(ddp));
  }
}

std::string list_of(const std::vector<std::string>& names) {
  constexpr size_t kMost = 5;
  std::ostringstream text;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) text << (i ? ", " : "") << names[i];
  if (names.size() > kMost) text << " and " << names.size() - kMost << " more";
  return text.str();
}

std::vector<at::TensorOptions> layouts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::TensorOptions> layouts;
  for (const auto& tensor : tensors) layouts.push_back(tensor.options());
  return layouts;
}

bool are_on_several_devices(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.device() != tensors.front().device();
  });
}

// The buckets of the first pass. They are rebuilt in the order in which gradients arrive, except if
// unused parameters are searched for in each pass.
std::vector<std::vector<size_t>> first_buckets(const std::vector<at::Tensor>& parameters,
                                               const DdpOptions& options) {
  std::vector<size_t> limits{std::numeric_limits<int64_t>::max()};
  if (options.find_unused_parameters && !options.static_graph) {
    limits = {static_cast<size_t>(options.first_bucket_bytes),
              static_cast<size_t>(options.bucket_bytes)};
  }
  const std::vector<bool> sparse(parameters.size(), false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, limits, sparse));
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

}  // namespace

CommHook::Finish CompressHook::start(c10d::GradBucket& bucket) {
  at::Tensor buffer = bucket.getBuffer();
  at::Tensor sent = buffer;
  const at::Scalar size = group_->getSize();
  if (buffer.element_size() > 2 && !buffer.is_complex()) {
    // In one kernel, and divided before it is rounded, so that sums do not overflow.
    sent = at::empty_like(buffer, buffer.options().dtype(kind_));
    at::div_out(sent, buffer, c10::scalar_to_tensor(size));
  } else {
    buffer.div_(size);
  }
  std::vector<at::Tensor> tensors{sent};
  auto work = group_->allreduce(tensors);
  return [buffer, sent, work]() mutable {
    work->wait();
    if (!sent.is_same(buffer)) {
      buffer.copy_(sent);
      use_on_current_stream(sent);
    }
    return buffer;
  };
}

void Reducer::take_hooks_away() {
  remove_autograd_hooks();
  std::lock_guard<std::mutex> lock(mutex_);
  hooks_.clear();
}

void Reducer::set_accumulators(const std::vector<NodePtr<Node>>& nodes) {
  std::lock_guard<std::mutex> lock(mutex_);
  grad_accumulators_ = nodes;
  gradAccToVariableMap_.clear();
  if (!find_unused_parameters_) return;
  for (size_t i = 0; i < nodes.size(); ++i) gradAccToVariableMap_[nodes[i].get()] = i;
}

bool Reducer::awaits_gradients() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return expect_autograd_hooks_;
}

bool Reducer::has_started_all() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return next_bucket_ == buckets_.size();
}

std::vector<size_t> Reducer::unused_parameters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return unused_parameters_;
}

bool Reducer::may_rebuild() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return should_rebuild_buckets();
}

void Reducer::set_timing(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (on && held_timer_) timer_ = std::move(held_timer_);
  if (!on && timer_) held_timer_ = std::move(timer_);
}

Ddp::Ddp(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<at::Tensor> parameters,
         std::vector<std::string> names, std::vector<at::Tensor> frozen,
         std::vector<at::Tensor> buffers, DdpOptions options, std::unique_ptr<CommHook> hook)
    : group_(std::move(group)),
      parameters_(std::move(parameters)),
      names_(std::move(names)),
      frozen_(std::move(frozen)),
      buffers_(std::move(buffers)),
      layouts_(layouts_of(parameters_)),
      options_(options),
      is_on_several_devices_(are_on_several_devices(parameters_)),
      last_pass_(parameters_.size(), 0),
      is_local_(parameters_.size(), false) {
  const size_t count = parameters_.size();
  std::unordered_map<size_t, std::string> named;
  for (size_t i = 0; i < count; ++i) named.emplace(i, names_[i]);
  reducer_ = std::make_shared<Reducer>(
      parameters_, first_buckets(parameters_, options), group_, std::vector<bool>(count, false),
      options.bucket_bytes, options.find_unused_parameters, options.gradient_as_bucket_view,
      std::move(named), options.first_bucket_bytes, /*skip_all_reduce_unused_params=*/false,
      /*use_python_reducer=*/false, std::vector<int64_t>{});
  logger_ = std::make_shared<c10d::Logger>(reducer_);
  reducer_->set_logger(logger_);
  logger_->set_construction_data_and_log("tch_extension", {}, -1, options.broadcast_buffers, false,
                                         options.static_graph);
  if (options.static_graph) {
    reducer_->set_static_graph();
    logger_->set_static_graph();
  }
  if (!hook && options.compress >= 0) {
    hook = std::make_unique<CompressHook>(group_, static_cast<at::ScalarType>(options.compress));
  }
  if (hook) {
    hook_ = hook.get();
    reducer_->register_comm_hook(std::move(hook));
  }
  reducer_->take_hooks_away();
  add_hooks();
}

Ddp::~Ddp() { remove_hooks(); }

void Ddp::add_hooks() {
  using torch::autograd::utils::LambdaPostHook;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto node = torch::autograd::impl::grad_accumulator(parameters_[i]);
    hooks_.push_back(node->add_post_hook(std::make_unique<LambdaPostHook>(
        [this, i](const variable_list& outputs, const variable_list&) {
          arrive(i);
          return outputs;
        })));
    accumulators_.push_back(std::move(node));
  }
  reducer_->set_accumulators(accumulators_);
}

void Ddp::remove_hooks() {
  for (size_t i = 0; i < hooks_.size(); ++i) accumulators_[i]->del_post_hook(hooks_[i]);
  hooks_.clear();
  accumulators_.clear();
}

// The engine adds a gradient on the stream that was current when the accumulator was made. If it is
// another one than that of the forward pass, each gradient costs two events, and a capture fails.
void Ddp::follow_stream(bool capturing) {
  const at::Device device = parameters_.front().device();
  if (device.is_cpu() || is_on_several_devices_) return;
  const auto stream = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
  const auto is_elsewhere = [&](const NodePtr<Node>& node) { return node->stream() != stream; };
  if (std::none_of(accumulators_.begin(), accumulators_.end(), is_elsewhere)) return;
  remove_hooks();
  reducer_->set_accumulators({});
  // A node that a graph keeps alive stays the parameter's.
  add_hooks();
  TORCH_CHECK(
      !capturing || std::none_of(accumulators_.begin(), accumulators_.end(), is_elsewhere),
      "a graph of an earlier forward pass is alive, which would draw another stream into the "
      "capture; drop its tensors first");
}

void Ddp::refuse_in_hook() const {
  TORCH_CHECK(in_hook != this, "it was called by a communication hook, which must not use the Ddp");
}

void Ddp::check_tensors() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& tensor = parameters_[i];
    TORCH_CHECK(tensor.requires_grad(), names_[i],
                " was frozen after Ddp::new; make a new Ddp for it on all ranks");
    TORCH_CHECK(tensor.options().type_equal(layouts_[i]) && tensor.device() == layouts_[i].device(),
                names_[i], " was converted or moved after Ddp::new; make a new Ddp on all ranks");
  }
  for (const auto& tensor : frozen_) {
    TORCH_CHECK(!tensor.requires_grad(),
                "a parameter that was frozen requires a gradient since Ddp::new; make a new Ddp "
                "for it on all ranks");
  }
}

void Ddp::begin(bool synchronise, bool capturing) {
  refuse_in_hook();
  check_tensors();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    settle();
    check_finished();
  }
  const bool grad = at::GradMode::is_enabled();
  synchronises_ = grad && synchronise;
  if (capturing && grad) {
    TORCH_CHECK(!options_.find_unused_parameters || options_.static_graph,
                "find_unused_parameters waits for the GPU in each pass, so it cannot be captured; "
                "use static_graph");
    TORCH_CHECK(!reducer_->may_rebuild(),
                "the buckets are not final yet; run at least 3 synchronised steps before the "
                "capture (StepOptions::warm_up)");
  }
  if (grad) follow_stream(capturing);
  reducer_->set_timing(!capturing);
  if (synchronises_) {
    if (!capturing) logger_->set_runtime_stats_and_log();
    reducer_->prepare_for_forward();
  }
  if (grad) reducer_->rebuild_buckets();
  if (options_.broadcast_buffers && buffers_are_due_ && !buffers_.empty()) {
    at::NoGradGuard no_grad;
    c10d::broadcast_coalesced(group_, buffers_, kBroadcastBytes, 0);
    for (const auto& buffer : buffers_) buffer.unsafeGetTensorImpl()->bump_version();
  }
}

void Ddp::end(std::vector<at::Tensor>& outputs) {
  buffers_are_due_ = synchronises_;
  const bool searches = options_.find_unused_parameters && !options_.static_graph;
  if (synchronises_) {
    std::lock_guard<std::mutex> lock(mutex_);
    settle();
    if (hook_) hook_->reset();
    std::vector<at::Tensor> defined;
    for (const auto& output : outputs) {
      if (searches && output.defined()) defined.push_back(output);
    }
    reducer_->prepare_for_backward(defined);
    ++pass_;
    arrived_ = 0;
    is_open_ = true;
    end_is_queued_ = false;
    has_ended_ = false;
  }
  if (!at::GradMode::is_enabled()) return;
  if (searches || (options_.static_graph && !delay_is_queued())) {
    pass_through(outputs, shared_from_this());
  } else {
    keep_alive(outputs, shared_from_this());
  }
}

bool Ddp::delay_is_queued() {
  std::lock_guard<std::mutex> lock(mutex_);
  return delay_is_queued_;
}

void Ddp::backward_begins() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!options_.static_graph || delay_is_queued_ || !reducer_->awaits_gradients()) return;
  delay_is_queued_ = true;
  auto self = shared_from_this();
  torch::autograd::Engine::get_default_engine().queue_callback([self] {
    {
      const InHook mark(self.get());
      self->reducer_->delay_all_reduce();
    }
    self->note_end();
  });
}

void Ddp::note_end() {
  std::lock_guard<std::mutex> lock(mutex_);
  has_ended_ = true;
}

void Ddp::arrive(size_t index) {
  const auto& gradient = parameters_[index].grad();
  TORCH_CHECK(!gradient.defined() || gradient.layout() == at::kStrided, "Ddp: ", names_[index],
              " got a sparse gradient, which is not reduced; use a dense embedding");
  {
    std::lock_guard<std::mutex> lock(mutex_);
    settle();
    const bool is_awaited = reducer_->awaits_gradients();
    is_local_[index] = !is_awaited;
    if (is_awaited) {
      ++arrived_;
      last_pass_[index] = pass_;
    } else if (options_.static_graph) {
      // In its first backward pass, the Reducer counts how often each gradient arrives, and waits
      // for as many in each later one. It would also count what is not synchronised.
      return;
    }
  }
  const InHook mark(this);
  // Also outside of a synchronised pass, so that the parameter counts as used in the next one.
  reducer_->autograd_hook(index);
  if (!reducer_->has_started_all()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(end_is_queued_, true)) return;
  // The Reducer has just queued the end of its reductions. If that throws, the engine runs no
  // callback after it.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->note_end(); });
}

// A reduction averages all that is in the gradients by then. That of a static graph leaves out what
// the synchronised pass does not use.
void Ddp::settle() {
  if (!is_open_ || !has_ended_) return;
  is_open_ = false;
  if (!options_.static_graph) is_local_.assign(is_local_.size(), false);
  is_synchronised_ = true;
}

std::string Ddp::local() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < names_.size(); ++i) {
    if (is_local_[i] && parameters_[i].grad().defined()) names.push_back(names_[i]);
  }
  return list_of(names);
}

std::string Ddp::missing() const {
  const auto unused = reducer_->unused_parameters();
  std::vector<std::string> names;
  for (size_t i = 0; i < names_.size(); ++i) {
    const bool known = std::find(unused.begin(), unused.end(), i) != unused.end();
    if (last_pass_[i] != pass_ && !known) names.push_back(names_[i]);
  }
  return list_of(names);
}

void Ddp::check_finished() {
  if (!is_open_ || arrived_ == 0) return;
  const std::string names = missing();
  TORCH_CHECK(!names.empty(),
              "the last backward pass did not end: it failed, or the loss does not depend on the "
              "outputs of Ddp::forward");
  TORCH_CHECK(false, "the last backward pass gave no gradient to ", names,
              options_.static_graph
                  ? "; with static_graph, each pass must use the same parameters as the first"
                  : (options_.find_unused_parameters
                         ? "; return all tensors of which the loss is made from Ddp::forward"
                         : "; set find_unused_parameters, or leave them out of the model"));
}

void Ddp::check(bool for_step) {
  refuse_in_hook();
  std::lock_guard<std::mutex> lock(mutex_);
  settle();
  check_finished();
  const std::string names = local();
  TORCH_CHECK(
      names.empty(), "gradients of this rank only were added to ", names,
      ": by a backward pass that did not begin in Ddp::forward, by a second one of the same "
      "forward pass, or in Ddp::no_sync without a synchronised pass after it",
      options_.static_graph ? " that uses the same parameters" : "");
  TORCH_CHECK(!for_step || is_synchronised_,
              "no backward pass was synchronised since the last step; compute the loss inside "
              "Ddp::forward, or from its outputs, and call backward before the step");
}

void Ddp::mark_stepped() {
  std::lock_guard<std::mutex> lock(mutex_);
  settle();
  is_synchronised_ = false;
}

}  // namespace tch_extension
