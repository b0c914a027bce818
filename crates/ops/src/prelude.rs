//! What nearly all modules of this crate use.

pub(crate) use std::cell::{Cell, OnceCell, RefCell};

pub(crate) use devcomm_host::{
    Buffer, CollectiveCall, Communicator, Context, DataType, DevCommError, DevCommRequirements,
    DevCommResource, DeviceSlice, Error, Kernels, LaunchConfig, ReduceOp, Result, Stream,
    StreamOrder, SymmetricBuffer, TensorMap, Window,
};
pub(crate) use devcomm_kernels as kernels;
pub(crate) use devcomm_types::{Element, F8E4M3, F8E5M2, IntoArg, Kernel};
pub(crate) use half::{bf16, f16};

pub(crate) use crate::agree::{hash, is_single_lsa_team, or_default};
pub(crate) use crate::check::{
    address, address_apart, aligned, check_len, refuse, refuse_if, require_apart, require_context,
    rows_of_each, window,
};
pub(crate) use crate::extents::Extents;
pub(crate) use crate::lamport::LamportMemory;
pub(crate) use crate::launch::{Abi, LaunchWith, with_element, with_type};
pub(crate) use crate::{Explanation, KERNELS};
