//! How the other devices of this process reach a rank's memory.
//!
//! A copy between devices is cheapest to start where the memory is mapped for both (a third of the
//! time that a peer copy takes the host). NCCL maps its windows for the ranks that load and store
//! to each other, under addresses of its own; what it registers may be mapped for its own device
//! only. So the plugin looks, and else maps the same physical memory once more, for all devices
//! that can reach it.

use std::ffi::c_int;

use crate::driver::{AccessDescription, Address, Device, Location, READ_WRITE, call};
use crate::error::{Error, Result};
use crate::log;

/// A region as other devices reach it.
pub(crate) struct Reach {
    base: Address,
    devices: Vec<c_int>,
    mapping: Option<Mapping>,
}

impl Reach {
    /// Of `bytes` at `base` on `owner`, for as many of `others` as can be; `None`: for none of
    /// them.
    pub(crate) fn of(
        owner: &Device,
        base: Address,
        bytes: usize,
        others: &[c_int],
    ) -> Option<Self> {
        let near = |other: &c_int| owner.reaches(*other);
        let devices: Vec<c_int> = others.iter().copied().filter(near).collect();
        if devices.is_empty() || bytes == 0 {
            return None;
        }
        let reach =
            match is_mapped(owner, base, bytes, &devices) {
                Ok(true) => Ok(Self { base, devices, mapping: None }),
                Ok(false) => Mapping::new(owner, base, bytes, &devices)
                    .map(|(mapping, base)| Self { base, devices, mapping: Some(mapping) }),
                Err(error) => Err(error),
            };
        reach
            .inspect_err(|error| {
                log::debug(format_args!("{bytes} bytes at {base:#x} go by peer copies: {error}"));
            })
            .ok()
    }

    /// The address for `device`.
    pub(crate) fn address(&self, device: c_int, offset: usize) -> Option<Address> {
        self.devices.contains(&device).then(|| self.base + offset as Address)
    }

    /// Whether it is gone when this is dropped.
    pub(crate) fn is_own_mapping(&self) -> bool {
        self.mapping.is_some()
    }
}

/// A piece of physical memory as it is mapped at an address.
fn segment(owner: &Device, at: Address) -> Result<(Address, usize)> {
    let (mut base, mut bytes) = (0, 0);
    let place = "for the extent of a region";
    call!(*owner.driver, place, cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, at))?;
    if at < base || at - base >= bytes as Address {
        return Err(Error::Internal(format!("the memory at {at:#x} has no extent")));
    }
    Ok((base, bytes))
}

/// Whether all of `devices` reach all of the region at its own address.
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
        let (start, length) = segment(owner, at)?;
        at = start + length as Address;
    }
    Ok(true)
}

/// The plugin's own mapping of physical memory. It keeps that alive.
struct Mapping {
    device: Device,
    address: Address,
    bytes: usize,
}

impl Mapping {
    /// Maps the memory of a region, and returns the region's base in it.
    fn new(
        owner: &Device,
        base: Address,
        bytes: usize,
        others: &[c_int],
    ) -> Result<(Self, Address)> {
        let _entered = owner.enter()?;
        let driver = &*owner.driver;
        let (start, length) = segment(owner, base)?;
        if base + bytes as Address > start + length as Address {
            return Err(Error::Unserved("it has several pieces of physical memory".to_owned()));
        }
        let place = "for the mapping of a region";
        let (mut memory, mut address) = (0, 0);
        call!(
            *driver,
            place,
            cuMemRetainAllocationHandle(&raw mut memory, start as *mut std::ffi::c_void)
        )?;
        let reserved =
            call!(*driver, place, cuMemAddressReserve(&raw mut address, length, 0, 0, 0));
        // NCCL, too, takes it that a mapping begins where its memory begins.
        let mapped = reserved.and_then(|()| {
            let mapped = call!(*driver, place, cuMemMap(address, length, 0, memory, 0));
            if mapped.is_err() {
                let _ = call!(*driver, place, cuMemAddressFree(address, length));
            }
            mapped
        });
        // The mapping keeps the memory from here on.
        let released = call!(*driver, place, cuMemRelease(memory));
        mapped?;
        let mapping = Self { device: owner.clone(), address, bytes: length };
        released?;
        let all = others.iter().chain([&owner.number]);
        let access: Vec<_> = all.map(|device| AccessDescription::of(*device)).collect();
        call!(*driver, place, cuMemSetAccess(address, length, access.as_ptr(), access.len()))?;
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
