"""Patches to Horovod 0.28.1: a rank that waits sleeps, and is woken. In force where HOROVOD_WAKE_ON_ENQUEUE=1 is set.

As released, Horovod's background thread looks for new tensors every HOROVOD_CYCLE_TIME milliseconds, and each look is a
collective over all ranks; the thread that waits for a result asks for it in a loop. Both take cores from the threads that
compute, and a small model's step is shorter than the default cycle. With the variable set,

- the background thread sleeps until a tensor is queued. While a tensor of this rank waits for other ranks, while process
  sets other than the global one are there, and while autotuning runs, it looks as often as before; else once a second, for
  the stall check and for ranks that shut down.
- the thread that waits for a result sleeps until it is there.

Hence `hvd.shutdown` may take up to a second longer than in the release where another rank is in Horovod, but idle.
A rank that queues nothing is not needed by the others: a tensor is ready when all ranks have queued it. (`hvd.join` queues
one, which stays until all ranks have joined.)
"""

from __future__ import annotations

from patching import Patch

_DOORBELL = """namespace horovod {
namespace common {

// Rung when a tensor is queued, or shutdown wanted; the background thread waits for it.
class Doorbell {
public:
  // Never destroyed: the background thread outlives static objects.
  static Doorbell& Get() {
    static auto* bell = new Doorbell;
    return *bell;
  }

  static bool Enabled() {
    static const bool enabled = [] {
      auto value = std::getenv("HOROVOD_WAKE_ON_ENQUEUE");
      return value != nullptr && std::strtol(value, nullptr, 10) > 0;
    }();
    return enabled;
  }

  void Ring() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      rung_ = true;
    }
    condition_.notify_one();
  }

  void WaitUntil(std::chrono::steady_clock::time_point end) {
    std::unique_lock<std::mutex> guard(mutex_);
    condition_.wait_until(guard, end, [this] { return rung_; });
    rung_ = false;
  }

private:
  std::mutex mutex_;
  std::condition_variable condition_;
  bool rung_ = false;
};

class TensorQueue {
public:
  // Whether a tensor of this rank has not been reduced yet.
  bool Waiting() const {
    std::lock_guard<std::mutex> guard(mutex_);
    return !tensor_table_.empty();
  }

"""

_QUEUED_ONE = """  message_queue_.push(std::move(message));
  return Status::OK();
"""

_QUEUED_MANY = """    message_queue_.push(std::move(messages[i]));
  }
  return Status::OK();
"""

_SLEEP = """  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
"""

_WAIT = """  if (Doorbell::Enabled()) {
    bool looks_often = state.dynamic_process_sets ||
                       state.process_set_table.Ids().size() > 1 ||
                       state.parameter_manager.IsAutoTuning() ||
                       state.process_set_table.Get(0).tensor_queue.Waiting();
    // The last cycle ended on all ranks at about the same time: so will this second.
    Doorbell::Get().WaitUntil(start_time +
                              (looks_often ? sleep_duration
                                           : std::chrono::seconds(1)));
  } else if (sleep_duration > std::chrono::steady_clock::duration::zero()) {
    std::this_thread::sleep_for(sleep_duration);
  }
"""

_SPIN = """void WaitAndClear(int handle) {
"""

_BLOCK = """void WaitAndClear(int handle) {
  if (Doorbell::Enabled()) {
    py::gil_scoped_release release_python_gil;
    handle_manager.WaitForHandle(handle);
  }
"""

_MARK_DONE = """  std::lock_guard<std::mutex> guard(mutex_);
  results_[handle] = std::make_shared<Status>(status);
}
"""

_MARK_DONE_AND_NOTIFY = """  {
    std::lock_guard<std::mutex> guard(mutex_);
    results_[handle] = std::make_shared<Status>(status);
  }
  condition_.notify_all();
}

void HandleManager::WaitForHandle(int handle) {
  std::unique_lock<std::mutex> guard(mutex_);
  condition_.wait(guard, [this, handle] {
    auto found = results_.find(handle);
    return found == results_.end() || found->second != nullptr;
  });
}
"""

_RESET = """  std::lock_guard<std::mutex> guard(mutex_);
  results_.clear();
  last_handle_ = 0;
}
"""

_RESET_AND_NOTIFY = """  {
    std::lock_guard<std::mutex> guard(mutex_);
    results_.clear();
    last_handle_ = 0;
  }
  condition_.notify_all();
}
"""

PATCHES = (
    Patch(
        "the background thread can wait for a tensor: the bell",
        "horovod/common/tensor_queue.h",
        "namespace horovod {\nnamespace common {\n\nclass TensorQueue {\npublic:\n",
        _DOORBELL,
    ),
    Patch(
        "the background thread can wait for a tensor: includes",
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n#include <mutex>\n",
        "#include <chrono>\n#include <condition_variable>\n#include <cstdlib>\n#include <iostream>\n#include <mutex>\n",
    ),
    Patch(
        "a queued tensor rings the bell",
        "horovod/common/tensor_queue.cc",
        _QUEUED_ONE,
        _QUEUED_ONE.replace("  return", "  Doorbell::Get().Ring();\n  return"),
    ),
    Patch(
        "a queued group of tensors rings it once",
        "horovod/common/tensor_queue.cc",
        _QUEUED_MANY,
        _QUEUED_MANY.replace("  return", "  Doorbell::Get().Ring();\n  return"),
    ),
    Patch(
        "shutdown rings it",
        "horovod/common/operations.cc",
        "    horovod_global.shut_down = true;\n    horovod_global.background_thread.join();\n",
        "    horovod_global.shut_down = true;\n    Doorbell::Get().Ring();\n"
        "    horovod_global.background_thread.join();\n",
    ),
    Patch(
        "an exit without shutdown rings it",
        "horovod/common/global_state.h",
        "      shut_down = true;\n      background_thread.join();\n",
        "      shut_down = true;\n      Doorbell::Get().Ring();\n      background_thread.join();\n",
    ),
    Patch(
        "the background thread waits for it instead of looking all the time",
        "horovod/common/operations.cc",
        _SLEEP,
        _WAIT,
    ),
    Patch(
        "who waits for a result can sleep until it is there: the handles",
        "horovod/torch/handle_manager.cc",
        _MARK_DONE,
        _MARK_DONE_AND_NOTIFY,
    ),
    Patch(
        # By `hvd.shutdown`. As released, a thread that polls finds its handle gone and raises: so must one that sleeps.
        "a thread that waits for a result is woken where all handles are dropped",
        "horovod/torch/handle_manager.cc",
        _RESET,
        _RESET_AND_NOTIFY,
    ),
    Patch(
        "who waits for a result can sleep until it is there: declarations",
        "horovod/torch/handle_manager.h",
        "  bool PollHandle(int handle);\n",
        "  bool PollHandle(int handle);\n  void WaitForHandle(int handle);\n",
    ),
    Patch(
        "who waits for a result can sleep until it is there: the condition",
        "horovod/torch/handle_manager.h",
        "  std::mutex mutex_;\n",
        "  std::mutex mutex_;\n  std::condition_variable condition_;\n",
    ),
    Patch(
        "who waits for a result can sleep until it is there: include",
        "horovod/torch/handle_manager.h",
        "#include <atomic>\n",
        "#include <atomic>\n#include <condition_variable>\n",
    ),
    Patch(
        "who waits for a result sleeps until it is there",
        "horovod/torch/mpi_ops_v2.cc",
        _SPIN,
        _BLOCK,
    ),
)
