//! The fake devices' memory and its mappings.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use devcomm_rma_loopback::driver::{
    AccessDescription, Address, Code, Location, READ_WRITE, SUCCESS,
};

const INVALID_VALUE: Code = 1;
/// Base of mappings, outside the process's addresses.
const MAPPINGS: Address = 1 << 60;
const SPACING: Address = 1 << 40;

/// How device memory was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory as from `ncclMemAlloc`: mapped for every device.
    AllDevices,
    /// Memory as NCCL's own buffers: mapped for its device only, but can be mapped for others.
    Owner,
    /// Memory as from `cudaMalloc`: it cannot be mapped for others.
    Malloc,
}

struct Allocation {
    bytes: usize,
    owner: c_int,
    kind: Kind,
}

struct Mapping {
    bytes: usize,
    memory: usize,
    devices: Vec<c_int>,
}

#[derive(Default)]
struct AllMemory {
    allocations: BTreeMap<usize, Allocation>,
    mappings: BTreeMap<Address, Mapping>,
    reserved: Address,
}

impl AllMemory {
    fn find(&self, at: usize) -> Option<(usize, &Allocation)> {
        let (base, found) = self.allocations.range(..=at).next_back()?;
        (at - base < found.bytes).then_some((*base, found))
    }
}

static ALL: Mutex<Option<AllMemory>> = Mutex::new(None);

fn all<T>(body: impl FnOnce(&mut AllMemory) -> T) -> T {
    body(ALL.lock().unwrap().get_or_insert_default())
}

/// Declares memory of this process to be memory of device `owner`.
pub fn allocate(base: usize, bytes: usize, owner: c_int, kind: Kind) {
    all(|all| {
        all.allocations.retain(|at, old| at + old.bytes <= base || base + bytes <= *at);
        all.allocations.insert(base, Allocation { bytes, owner, kind });
    });
}

/// Returns the number of mappings of the memory at `base` in addition to its own address.
pub fn mappings_of(base: usize) -> usize {
    all(|all| all.mappings.values().filter(|mapping| mapping.memory == base).count())
}

/// Returns the process's address for device address `at`, if `device` can access it.
pub fn translate(at: Address, device: c_int) -> Option<usize> {
    all(|all| {
        if at >= MAPPINGS {
            let (base, mapping) = all.mappings.range(..=at).next_back()?;
            let offset = (at - base) as usize;
            let accessible = offset < mapping.bytes && mapping.devices.contains(&device);
            return accessible.then_some(mapping.memory + offset);
        }
        let (_, found) = all.find(at as usize)?;
        (found.owner == device || found.kind == Kind::AllDevices).then_some(at as usize)
    })
}

pub unsafe extern "C" fn access(flags: *mut u64, location: *const Location, at: Address) -> Code {
    all(|all| match all.find(at as usize) {
        Some((_, found)) if found.kind != Kind::Malloc => {
            // SAFETY: the plugin passes valid pointers.
            unsafe {
                let accessible = found.kind == Kind::AllDevices || (*location).id == found.owner;
                *flags = if accessible { READ_WRITE as u64 } else { 0 };
            }
            SUCCESS
        }
        _ => INVALID_VALUE,
    })
}

pub unsafe extern "C" fn range(base: *mut Address, bytes: *mut usize, at: Address) -> Code {
    all(|all| match all.find(at as usize) {
        Some((start, found)) => {
            // SAFETY: the plugin passes valid pointers.
            unsafe { (*base, *bytes) = (start as Address, found.bytes) };
            SUCCESS
        }
        None => INVALID_VALUE,
    })
}

pub unsafe extern "C" fn retain(handle: *mut u64, at: *mut c_void) -> Code {
    all(|all| match all.find(at as usize) {
        Some((start, found)) if found.kind != Kind::Malloc => {
            // SAFETY: the plugin passes valid pointers.
            unsafe { *handle = start as u64 };
            SUCCESS
        }
        _ => INVALID_VALUE,
    })
}

pub unsafe extern "C" fn reserve(to: *mut Address, _: usize, _: usize, _: Address, _: u64) -> Code {
    all(|all| {
        all.reserved += SPACING;
        // SAFETY: the plugin passes valid pointers.
        unsafe { *to = MAPPINGS + all.reserved };
    });
    SUCCESS
}

pub unsafe extern "C" fn free_address(_: Address, _: usize) -> Code {
    SUCCESS
}

pub unsafe extern "C" fn map(to: Address, bytes: usize, _: usize, handle: u64, _: u64) -> Code {
    let mapping = Mapping { bytes, memory: handle as usize, devices: Vec::new() };
    all(|all| all.mappings.insert(to, mapping));
    SUCCESS
}

pub unsafe extern "C" fn set_access(
    to: Address,
    _: usize,
    descriptions: *const AccessDescription,
    count: usize,
) -> Code {
    // SAFETY: the plugin passes an array of `count` descriptions.
    let descriptions = unsafe { std::slice::from_raw_parts(descriptions, count) };
    all(|all| match all.mappings.get_mut(&to) {
        Some(mapping) => {
            mapping.devices = descriptions.iter().map(|one| one.location.id).collect();
            SUCCESS
        }
        None => INVALID_VALUE,
    })
}

pub unsafe extern "C" fn unmap(to: Address, _: usize) -> Code {
    all(|all| if all.mappings.remove(&to).is_some() { SUCCESS } else { INVALID_VALUE })
}

pub unsafe extern "C" fn release(_: u64) -> Code {
    SUCCESS
}
