//! What nearly all modules of this crate use.

pub(crate) use devcomm_host::{
    Buffer, Communicator, Context, DevCommError, DevCommRequirements, DevCommResource, DeviceSlice,
    Error, Kernels, LaunchConfig, Result, Stream, StreamOrder, SymmetricBuffer, Window,
};
pub(crate) use devcomm_kernels as kernels;
pub(crate) use devcomm_types::{Element, F8E4M3, Kernel};
pub(crate) use half::bf16;

pub(crate) use crate::check::{address, refuse, refuse_if, require_context};
pub(crate) use crate::extents::Extents;
pub(crate) use crate::launch::LaunchWith;
pub(crate) use crate::{Explanation, KERNELS};
