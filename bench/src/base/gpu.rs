//! Properties of a rank's GPU, as the driver reports them.

use anyhow::{Result, ensure};
use cudarc::driver::result::device;
use cudarc::driver::sys;
use devcomm::Context;

/// Returns the size of the L2 cache in bytes.
pub fn l2_bytes(context: &Context) -> Result<usize> {
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
    // SAFETY: the ordinal is a context's, so that the device exists.
    let bytes = unsafe { device::get_attribute(device::get(context.ordinal() as i32)?, attribute) };
    let bytes = usize::try_from(bytes?)?;
    ensure!(bytes > 0, "the driver does not tell the size of the L2 cache");
    Ok(bytes)
}

/// Returns the PCI bus ID, such as `0000:1B:00.0`, with a zero at the end.
pub fn pci_bus_id(context: &Context) -> Result<[u8; 32]> {
    let mut id = [0; 32];
    let device = device::get(context.ordinal() as i32)?;
    // SAFETY: `id` has the size that is passed.
    unsafe { sys::cuDeviceGetPCIBusId(id.as_mut_ptr().cast(), id.len() as i32, device).result()? };
    Ok(id)
}
