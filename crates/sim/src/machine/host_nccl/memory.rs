//! `ncclMemAlloc` and buffer registration.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

use devcomm_sys::nccl::{RawComm, SUCCESS};
use litemap::LiteMap;

use super::call::{NcclError, UNHANDLED_CUDA_ERROR, call_ungrouped};
use crate::base::error::Error;
use crate::base::owner::Owner;
use crate::base::ranges::last_until;
use crate::machine::driver;
use crate::memory::{Allocation, Pages, WindowPart};

/// Allocations by address.
pub(super) type Memory = RefCell<LiteMap<usize, Allocated>>;

/// Memory of one GPU.
pub(super) struct Allocated {
    gpu: usize,
    pages: Rc<Pages>,
    allocation: Allocation,
}

impl super::State {
    /// Returns memory from `ncclMemAlloc`, as a rank's part of a window.
    pub(super) fn window_part(&self, address: usize, bytes: usize) -> Option<WindowPart> {
        let memory = self.memory.borrow();
        let (start, found) = last_until(&memory, address)?;
        let (start, len) = (address - start, found.allocation.lens()[0]);
        (start < len && bytes <= len - start).then(|| WindowPart {
            pages: Rc::clone(&found.pages),
            start,
            bytes,
        })
    }
}

pub(super) unsafe extern "C" fn alloc(address: *mut *mut c_void, bytes: usize) -> c_int {
    call_ungrouped("ncclMemAlloc", null_mut(), |cx| {
        cx.note(|| bytes.to_string());
        let (gpu, core) = (cx.gpu()?, cx.core);
        let owner = Owner::Buffer { id: core.nccl.next_id(), rank: gpu };
        let device = &core.devices[gpu];
        if bytes > driver::MEMORY.saturating_sub(device.allocated.get()) {
            let text = format!("GPU {gpu} has fewer than {bytes} bytes left");
            return Err(NcclError::new(UNHANDLED_CUDA_ERROR, text));
        }
        let to_nccl = |error: Error| NcclError::new(UNHANDLED_CUDA_ERROR, error.to_string());
        let allocated = Allocation::shareable(&core.memory, gpu as u32, bytes, owner);
        let (allocation, pages) = allocated.map_err(to_nccl)?;
        device.allocated.set(device.allocated.get() + bytes);
        let start = allocation.part(0);
        core.nccl.memory.borrow_mut().insert(start.addr(), Allocated { gpu, pages, allocation });
        let result = if cx.injects_null() { null_mut() } else { start.cast() };
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { address.write(result) };
        Ok(())
    })
}

/// Frees an allocation. Its pages stay mapped while a window has them.
pub(super) unsafe extern "C" fn free(address: *mut c_void) -> c_int {
    if address.is_null() {
        return SUCCESS;
    }
    const NAME: &str = "ncclMemFree";
    call_ungrouped(NAME, null_mut(), |cx| {
        let freed = cx.core.nccl.memory.borrow_mut().remove(&address.addr());
        let freed =
            freed.ok_or_else(|| NcclError::argument(format!("{address:p} was not allocated")))?;
        let start = address.addr();
        let what = || cx.core.memory.owner(start).map_or_else(String::new, |own| own.to_string());
        let memory = start..start + freed.allocation.lens()[0];
        cx.core.check_unused(NAME, what, freed.gpu, |word| memory.contains(&word))?;
        let allocated = &cx.core.devices[freed.gpu].allocated;
        allocated.set(allocated.get().saturating_sub(freed.allocation.lens()[0]));
        Ok(())
    })
}

/// Returns a handle and does nothing else: the simulator's collectives need no registration. In a
/// group the call is made at once too, and its failure does not fail the group.
pub(super) unsafe extern "C" fn register(
    comm: RawComm,
    address: *mut c_void,
    bytes: usize,
    handle: *mut *mut c_void,
) -> c_int {
    call_ungrouped("ncclCommRegister", comm, |cx| {
        cx.note(|| bytes.to_string());
        let rank_comm = cx.live(comm)?;
        cx.check_access(&rank_comm, address.addr(), bytes)?;
        let new = cx.core.new_handle();
        rank_comm.buffers.borrow_mut().insert(new);
        let result = if cx.injects_null() { 0 } else { new };
        // SAFETY: the program passes a valid out pointer, as NCCL requires.
        unsafe { handle.write(result as *mut c_void) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn deregister(comm: RawComm, handle: *mut c_void) -> c_int {
    call_ungrouped("ncclCommDeregister", comm, |cx| {
        let rank_comm = cx.rank_comm(comm)?;
        match rank_comm.buffers.borrow_mut().remove(&(handle as u64)) {
            true => Ok(()),
            false => Err(NcclError::argument("not a registered buffer of the communicator")),
        }
    })
}
