// A window as a kernel's parameter: NCCL's handle and the length in elements, as Rust's `Window<T>`.

#pragma once

#include <nccl_device.h>

struct Window {
  ncclWindow_t handle;
  size_t len;

  __device__ operator ncclWindow_t() const { return handle; }
};
