//! Memory of `ncclMemAlloc`, and buffers that are registered.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

use devcomm_sys::nccl::{RawComm, SUCCESS};
use litemap::LiteMap;

use super::call::{Begun, Refusal, UNHANDLED_CUDA_ERROR, call, question};
use crate::driver;
use crate::memory::{Allocation, Owner, Pages, Part, last_until};

/// What is allocated, by address.
pub(super) type Memory = RefCell<LiteMap<usize, Allocated>>;

/// Memory of one GPU.
pub(super) struct Allocated {
    gpu: usize,
    pages: Rc<Pages>,
    own: Allocation,
}

impl super::State {
    /// The memory at an address, as a part of a window.
    pub(super) fn part(&self, address: usize, bytes: usize) -> Option<Part> {
        let memory = self.memory.borrow();
        let (start, found) = last_until(&memory, address)?;
        let (start, len) = (address - start, found.own.lens()[0]);
        (start < len && bytes <= len - start).then(|| Part {
            pages: Rc::clone(&found.pages),
            start,
            bytes,
        })
    }
}

pub(super) unsafe extern "C" fn alloc(address: *mut *mut c_void, bytes: usize) -> c_int {
    question("ncclMemAlloc", null_mut(), |ask| {
        ask.note(|| bytes.to_string());
        let (gpu, core) = (ask.gpu()?, ask.core);
        let owner = Owner::Buffer { id: core.nccl.next_id(), rank: gpu };
        let device = &core.devices[gpu];
        if bytes > driver::MEMORY.saturating_sub(device.allocated.get()) {
            let text = format!("GPU {gpu} has no {bytes} bytes left");
            return Err(Refusal::new(UNHANDLED_CUDA_ERROR, text));
        }
        let refused = |error: crate::Error| Refusal::new(UNHANDLED_CUDA_ERROR, error.to_string());
        let allocated = Allocation::shareable(&core.memory, gpu as u32, bytes, owner);
        let (own, pages) = allocated.map_err(refused)?;
        device.allocated.set(device.allocated.get() + bytes);
        let start = own.part(0);
        core.nccl.memory.borrow_mut().insert(start.addr(), Allocated { gpu, pages, own });
        let given = if ask.gives_null() { null_mut() } else { start.cast() };
        // SAFETY: the module's.
        unsafe { address.write(given) };
        Ok(())
    })
}

/// Windows over it keep the bytes.
pub(super) unsafe extern "C" fn free(address: *mut c_void) -> c_int {
    if address.is_null() {
        return SUCCESS;
    }
    question("ncclMemFree", null_mut(), |ask| {
        let freed = ask.core.nccl.memory.borrow_mut().remove(&address.addr());
        let freed =
            freed.ok_or_else(|| Refusal::argument(format!("{address:p} was not allocated")))?;
        let allocated = &ask.core.devices[freed.gpu].allocated;
        allocated.set(allocated.get().saturating_sub(freed.own.lens()[0]));
        Ok(())
    })
}

/// Collectives do not need it here: all that comes of it is a handle.
pub(super) unsafe extern "C" fn register(
    comm: RawComm,
    address: *mut c_void,
    bytes: usize,
    handle: *mut *mut c_void,
) -> c_int {
    call("ncclCommRegister", comm, |ask| {
        ask.note(|| bytes.to_string());
        let member = ask.live(comm)?;
        ask.reached(&member, address.addr(), bytes)?;
        let new = ask.core.new_handle();
        member.buffers.borrow_mut().insert(new);
        let given = if ask.gives_null() { 0 } else { new };
        // SAFETY: the module's.
        unsafe { handle.write(given as *mut c_void) };
        Ok(Begun::Done(SUCCESS))
    })
}

pub(super) unsafe extern "C" fn deregister(comm: RawComm, handle: *mut c_void) -> c_int {
    call("ncclCommDeregister", comm, |ask| {
        let member = ask.member(comm)?;
        match member.buffers.borrow_mut().remove(&(handle as u64)) {
            true => Ok(Begun::Done(SUCCESS)),
            false => Err(Refusal::argument("no registered buffer of the communicator")),
        }
    })
}
