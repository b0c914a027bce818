//! Tests of kernels that are generic over GIN's back ends, on the host.

use cuda_std::prelude::*;
use devcomm_types::{GinType, HostKernel, Kernel, nccl};
use nccl_device::gin::GinBackend;
use nccl_device::{DevComm, Element};

/// Stores the mask of the back end that the kernel was compiled for.
#[kernel(B = gin)]
unsafe fn alone<B: GinBackend>(_comm: DevComm, mask: *mut u32) {
    // SAFETY: the pointer is valid for writes.
    unsafe { *mask = B::MASK };
}

/// A kernel that is generic over the back end and other parameters.
#[kernel(N = [2, 3], T = [f32, f16], B = gin)]
unsafe fn listed<T: Element, B: GinBackend, const N: usize>(_comm: DevComm, out: *mut (T, usize)) {
    let _: GinType = B::TYPE;
    // SAFETY: the pointer is valid for writes.
    unsafe { (*out).1 = N };
}

#[kernel]
fn without(_comm: DevComm) {}

fn name<K: Kernel>() -> (&'static str, bool) {
    (K::NAME, K::GIN)
}

/// # Safety
///
/// The kernel's contract; the kernel uses no device functions, since no thread is current.
unsafe fn call<K: HostKernel>(args: K::Args) {
    // SAFETY: the caller passes arguments as the kernel asks for them.
    unsafe { K::call(args) };
}

#[test]
fn a_launch_names_a_kernel_for_gin_without_its_back_end() {
    assert_eq!(name::<alone>(), ("alone", true));
    assert_eq!(name::<listed<f32, 2>>(), ("listed_f32_2", true));
    assert_eq!(name::<listed<f16, 3>>(), ("listed_f16_3", true));
    assert_eq!(name::<without>(), ("without", false));
}

#[test]
fn the_host_runs_the_body_of_the_proxy() {
    // SAFETY: the kernels do not use the device communicator.
    let comm = || unsafe { std::mem::transmute::<nccl::DevComm, DevComm>(nccl::DevComm::zeroed()) };
    let (mut mask, mut out) = (0, (0.0_f32, 0));
    // SAFETY: the pointers are to live variables.
    unsafe {
        call::<alone>((comm(), &raw mut mask));
        call::<listed<f32, 3>>((comm(), &raw mut out));
    }
    assert_eq!((mask, out.1), (1 << GinType::Proxy.raw(), 3));
}
