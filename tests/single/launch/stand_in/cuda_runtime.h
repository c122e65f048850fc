// A CUDA runtime without a GPU, on which waiting for an event fails, or already recording one: what gpu_operations.cc needs.
#pragma once
#include <cstddef>
struct CUstream_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorNotReady = 600, cudaErrorIllegalAddress = 700 };
struct cudaPointerAttributes {
  int device;
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1 };
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an illegal memory access was encountered";
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 1, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, int) { return cudaSuccess; }
inline cudaError_t recording = cudaSuccess;
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return recording; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaErrorIllegalAddress; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaErrorIllegalAddress; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaErrorIllegalAddress; }
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t*, int, int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int*, int*) { return cudaSuccess; }
inline cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }
