//! NCCL's functions as methods, each with a check of the first version that has it.

use std::ffi::{c_char, c_int, c_uint, c_void};

use devcomm_sys::nccl::{
    CollConfig, CommProperties, Config, EncryptionConfig, ParamHandle, RawComm, RawStream,
    RawUniqueId, RawWaitSignal, RawWindow, Requirements, ResourceRequirements, SimInfo,
};
use devcomm_types::DevComm;
use devcomm_types::nccl::{GinBarrierHandle, LlA2aHandle, LsaBarrierHandle, MultimemHandle, Team};

/// Declares the methods.
macro_rules! calls {
    ($( $name:ident = $symbol:literal since ($major:literal, $minor:literal, $patch:literal)
        ($($arg:ident: $type:ty),* $(,)?) -> $ret:ty; )*) => {
        impl super::Nccl {
            $(
                #[doc = concat!("NCCL: `", $symbol, "`.")]
                ///
                /// # Safety
                ///
                /// The C function's own contract.
                #[allow(clippy::too_many_arguments, reason = "those of the C function")]
                #[allow(dead_code, reason = "the table is complete, superseded functions included")]
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> crate::error::Result<$ret> {
                    const NEEDS: devcomm_locate::NcclVersion =
                        devcomm_locate::NcclVersion { major: $major, minor: $minor, patch: $patch };
                    self.require($symbol, NEEDS)?;
                    // A library may lack a function of its version; NVIDIA's builds do not.
                    let function =
                        self.functions.$name.ok_or_else(|| self.lacks($symbol, NEEDS))?;
                    self.machine.enter();
                    // SAFETY: the caller passes arguments that are valid for NCCL's function.
                    Ok(unsafe { function($($arg),*) })
                }
            )*
        }
    };
}

devcomm_sys::nccl_functions!(calls);
