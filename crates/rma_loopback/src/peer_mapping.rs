//! Maps a rank's memory for the other devices of this process.
//!
//! If memory is mapped for both devices, the host enqueues a copy between them in a third of the
//! time of a peer copy. NCCL maps its windows for the LSA team, but at other addresses; the address
//! that it registers with the plugin may be mapped for the owner's device only. So the plugin
//! checks, and if needed maps the same physical memory again, for all devices that can access it.

use std::ffi::c_int;

use crate::driver::{AccessDescription, Address, Device, Location, READ_WRITE, call};
use crate::error::{Error, Result};
use crate::log;

/// A region's address that other devices can access.
pub(crate) struct PeerMapping {
    base: Address,
    devices: Vec<c_int>,
    mapping: Option<Mapping>,
}

impl PeerMapping {
    /// Maps `bytes` at `base` on `owner` for those of `others` that can access that device. `None`
    /// if no other device can, or if the memory cannot be mapped.
    pub(crate) fn of(
        owner: &Device,
        base: Address,
        bytes: usize,
        others: &[c_int],
    ) -> Option<Self> {
        let can_access = |other: &c_int| owner.is_accessible_from(*other);
        let devices: Vec<c_int> = others.iter().copied().filter(can_access).collect();
        if devices.is_empty() || bytes == 0 {
            return None;
        }
        let peer_mapping =
            match is_mapped(owner, base, bytes, &devices) {
                Ok(true) => Ok(Self { base, devices, mapping: None }),
                Ok(false) => Mapping::new(owner, base, bytes, &devices)
                    .map(|(mapping, base)| Self { base, devices, mapping: Some(mapping) }),
                Err(error) => Err(error),
            };
        peer_mapping
            .inspect_err(|error| {
                log::debug(format_args!("{bytes} bytes at {base:#x} use peer copies: {error}"));
            })
            .ok()
    }

    /// Returns the address of byte `offset` for `device`; `None` if the region is not mapped for
    /// it.
    pub(crate) fn address(&self, device: c_int, offset: usize) -> Option<Address> {
        self.devices.contains(&device).then(|| self.base + offset as Address)
    }

    /// Returns whether the plugin made the mapping, so that dropping this unmaps it.
    pub(crate) fn is_own_mapping(&self) -> bool {
        self.mapping.is_some()
    }
}

/// Returns the base and bytes of the allocation that contains an address.
fn allocation(owner: &Device, at: Address) -> Result<(Address, usize)> {
    let (mut base, mut bytes) = (0, 0);
    let purpose = "for the extent of a region";
    call!(*owner.driver, purpose, cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, at))?;
    if at < base || at - base >= bytes as Address {
        return Err(Error::Internal(format!("the driver found no allocation at {at:#x}")));
    }
    Ok((base, bytes))
}

/// Returns whether all of `devices` can access the whole region at its own address.
fn is_mapped(owner: &Device, base: Address, bytes: usize, devices: &[c_int]) -> Result<bool> {
    let _entered = owner.enter()?;
    let mut at = base;
    while at < base + bytes as Address {
        for device in devices {
            let location = Location::device(*device);
            let mut flags = 0;
            call!(
                *owner.driver,
                "for the access to a region",
                cuMemGetAccess(&raw mut flags, &raw const location, at)
            )?;
            if flags != READ_WRITE as u64 {
                return Ok(false);
            }
        }
        let (start, length) = allocation(owner, at)?;
        at = start + length as Address;
    }
    Ok(true)
}

/// The plugin's own mapping of physical memory, which keeps the memory allocated.
struct Mapping {
    device: Device,
    address: Address,
    bytes: usize,
}

impl Mapping {
    /// Maps a region's memory; returns the region's base in the mapping.
    fn new(
        owner: &Device,
        base: Address,
        bytes: usize,
        others: &[c_int],
    ) -> Result<(Self, Address)> {
        let _entered = owner.enter()?;
        let driver = &*owner.driver;
        let (start, length) = allocation(owner, base)?;
        if base + bytes as Address > start + length as Address {
            return Err(Error::Unsupported("the region spans several allocations".to_owned()));
        }
        let purpose = "for the mapping of a region";
        let (mut memory, mut address) = (0, 0);
        call!(
            *driver,
            purpose,
            cuMemRetainAllocationHandle(&raw mut memory, start as *mut std::ffi::c_void)
        )?;
        let reserved =
            call!(*driver, purpose, cuMemAddressReserve(&raw mut address, length, 0, 0, 0));
        // As NCCL does, assume that the existing mapping begins at offset 0 of the allocation.
        let mapped = reserved.and_then(|()| {
            let mapped = call!(*driver, purpose, cuMemMap(address, length, 0, memory, 0));
            if mapped.is_err() {
                let _ = call!(*driver, purpose, cuMemAddressFree(address, length));
            }
            mapped
        });
        // From here on the mapping holds a reference to the memory.
        let released = call!(*driver, purpose, cuMemRelease(memory));
        mapped?;
        let mapping = Self { device: owner.clone(), address, bytes: length };
        released?;
        let all = others.iter().chain([&owner.number]);
        let access: Vec<_> = all.map(|device| AccessDescription::of(*device)).collect();
        call!(*driver, purpose, cuMemSetAccess(address, length, access.as_ptr(), access.len()))?;
        Ok((mapping, address + (base - start)))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter() else { return };
        let driver = &*self.device.driver;
        if call!(*driver, "at close", cuMemUnmap(self.address, self.bytes)).is_ok() {
            let _ = call!(*driver, "at close", cuMemAddressFree(self.address, self.bytes));
        }
    }
}
