//! NCCL's parameters and encryption. The tables and texts that NCCL returns are valid until the
//! calling thread's next call, and are copied at once.

use std::ffi::{CStr, c_int};
use std::ptr::{null, null_mut};

use super::{Nccl, text_of};
use crate::error::Result;
use devcomm_sys::nccl::EncryptionConfig;

/// NCCL: `ncclInvalidArgument`.
pub(super) const INVALID_ARGUMENT: c_int = 4;
/// NCCL: `NCCL_ENCRYPTION_MODE_PSK`.
pub(super) const ENCRYPTION_PSK: c_int = 1;

impl Nccl {
    pub(crate) fn parameter_keys(&self) -> Result<Vec<String>> {
        let (mut table, mut len) = (null_mut(), 0);
        // SAFETY: both are live for the call.
        let code = unsafe { self.param_get_all_parameter_keys(&raw mut table, &raw mut len)? };
        self.check("ncclParamGetAllParameterKeys", code, None)?;
        // NCCL returns no negative number.
        let len = if table.is_null() { 0 } else { usize::try_from(len).unwrap_or(0) };
        // SAFETY: the table has `len` entries, each NULL or a string; this thread has not called
        // NCCL since.
        Ok((0..len).map(|n| unsafe { text_of(*table.add(n)) }).collect())
    }

    /// Returns the value of a parameter; `None` for an unknown key.
    pub(crate) fn parameter(&self, key: &CStr) -> Result<Option<String>> {
        let (mut value, mut len) = (null(), 0);
        // SAFETY: the key is a string, and the others are live for the call.
        let code = unsafe { self.param_get_parameter(key.as_ptr(), &raw mut value, &raw mut len)? };
        if code == INVALID_ARGUMENT {
            return Ok(None);
        }
        self.check("ncclParamGetParameter", code, None)?;
        // SAFETY: NULL or a string; this thread has not called NCCL since.
        Ok(Some(unsafe { text_of(value) }))
    }

    pub(crate) fn dump_parameters(&self) -> Result<()> {
        // SAFETY: it takes no arguments.
        unsafe { self.param_dump_all() }
    }

    /// Sets the key for future connections; `None` turns their encryption off.
    pub(crate) fn encrypt(&self, psk: Option<&CStr>) -> Result<()> {
        // The struct below has the layout of this version.
        self.require("ncclSetEncryption (as of 2.32.3)", crate::sys::nccl::DEV_COMM_VERSION)?;
        let mut config = EncryptionConfig::new();
        if let Some(psk) = psk {
            (config.mode, config.psk) = (ENCRYPTION_PSK, psk.as_ptr());
        }
        // SAFETY: the struct contains its size and version, which the library supports as checked
        // above; the key is live for the call, in which NCCL copies it.
        let code = unsafe { self.set_encryption(&raw const config)? };
        self.check("ncclSetEncryption", code, None)
    }
}
