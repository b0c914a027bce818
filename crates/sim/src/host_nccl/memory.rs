//! Memory of `ncclMemAlloc`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use devcomm_sys::nccl::SUCCESS;

use super::call::{Refusal, UNHANDLED_CUDA_ERROR, question};
use crate::memory::{Allocation, Owner};

/// What is allocated, by address, with its GPU.
pub(super) type Memory = RefCell<BTreeMap<usize, (usize, Allocation)>>;

pub(super) unsafe extern "C" fn alloc(address: *mut *mut c_void, bytes: usize) -> c_int {
    question("ncclMemAlloc", null_mut(), |ask| {
        ask.note(|| bytes.to_string());
        let gpu = ask.gpu()?;
        let id = ask.core.new_handle() as u32;
        let allocated = Allocation::single(
            &ask.core.memory,
            std::iter::once(gpu as u32).collect(),
            bytes,
            Owner::Buffer { id, rank: gpu },
        );
        let allocated =
            allocated.map_err(|error| Refusal::new(UNHANDLED_CUDA_ERROR, error.to_string()))?;
        let start = allocated.part(0);
        ask.core.nccl.memory.borrow_mut().insert(start.addr(), (gpu, allocated));
        let given = if ask.gives_null() { null_mut() } else { start.cast() };
        // SAFETY: the module's.
        unsafe { address.write(given) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn free(address: *mut c_void) -> c_int {
    if address.is_null() {
        return SUCCESS;
    }
    question("ncclMemFree", null_mut(), |ask| {
        let freed = ask.core.nccl.memory.borrow_mut().remove(&address.addr());
        match freed {
            Some(_) => Ok(()),
            None => Err(Refusal::argument(format!("{address:p} was not allocated"))),
        }
    })
}
