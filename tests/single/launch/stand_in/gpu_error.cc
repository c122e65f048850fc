// One all-reduce of two tensors on rank 3, whose CUDA events fail: prints what their callbacks are told, and the shutdown.
#include <cstdlib>
#include <iostream>
#include <thread>

#include "horovod/common/logging.h"
#include "horovod/common/ops/gpu_operations.h"

namespace horovod {
namespace common {

// What FinalizeGPUQueue calls of the rest of Horovod, which is not linked.
std::shared_ptr<PersistentBuffer> FusionBufferManager::GetBuffer(int, Framework, int) { return nullptr; }
void Timeline::End(const std::string&, const std::shared_ptr<Tensor>&) {}

struct Context : OpContext {
  Status AllocatePersistent(int64_t, std::shared_ptr<PersistentBuffer>*) override { return Status::OK(); }
  Status AllocateOutput(TensorShape, std::shared_ptr<Tensor>*, std::shared_ptr<ReadyEvent>*) override { return Status::OK(); }
  Status AllocateZeros(int64_t, DataType, std::shared_ptr<Tensor>*) override { return Status::OK(); }
  Framework framework() const override { return Framework::PYTORCH; }
};

struct Rank : Controller {
  static int Controller::* of() { return &Rank::rank_; }
};

int all_reduce(bool async_completion) {
  // Zeros in place of objects whose constructors are not linked; only these members are used.
  auto& state = *static_cast<HorovodGlobalState*>(std::calloc(1, sizeof(HorovodGlobalState)));
  auto* controller = static_cast<Controller*>(std::calloc(1, sizeof(Controller)));
  controller->*Rank::of() = 3;
  new (&state.global_controller) std::shared_ptr<Controller>(controller, [](Controller*) {});
  state.num_nccl_streams = 1;
  state.enable_async_completion = async_completion;

  static GPUContext context;
  context.streams.resize(1);
  context.finalizer_thread_pool.create(1);
  std::atomic<int> called{0};
  std::vector<TensorTableEntry> entries(2);
  for (auto& entry : entries) {
    entry.tensor_name = "allreduce.conv1.weight";
    entry.context = std::make_shared<Context>();
    entry.device = 1;
    entry.callback = [&called](const Status& status) {
      std::cout << (status.ok() ? "ok" : status.reason()) << std::endl;
      called++;
    };
  }
  GPUOpContext operation(&context, &state);
  operation.InitGPU(entries);
  operation.InitGPUQueue(entries, Response());
  if (async_completion) {
    recording = cudaErrorIllegalAddress;
  }
  operation.FinalizeGPUQueue(entries, false);
  while (called < 2) {
    std::this_thread::yield();
  }
  context.Finalize();
  std::cout << "shut_down " << state.shut_down << std::endl;
  std::_Exit(0);
}

} // namespace common
} // namespace horovod

int main(int, char** arguments) { return horovod::common::all_reduce(arguments[1][0] == 'a'); }
