//! A loaded NCCL library: its functions, with version checks, and its errors.

#[cfg(test)]
mod abi_tests;
pub(crate) mod batch;
pub(crate) mod call;
pub(crate) mod calls;
mod functions;
pub(crate) mod lists;
pub(crate) mod lists_config;
pub(crate) mod params;
pub(crate) mod query;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use devcomm_locate::NcclVersion;

use crate::error::{Error, NcclError, Result};
use crate::machine::Machine;
use devcomm_sys::nccl::{ABI_VERSION, Functions, IN_PROGRESS, RawUniqueId, SUCCESS};

/// The NCCL version of the structs that this crate fills, and of the
/// [`DevComm`](devcomm_types::DevComm) that kernels read. A device communicator needs a library of
/// this version or newer, and kernels linked with this version's device code.
pub const DEV_COMM_VERSION: NcclVersion = NcclVersion::from_code(ABI_VERSION);

/// NCCL's functions. A library that was used stays loaded until the process ends, because NCCL's
/// threads continue to run: whoever calls [`load`](Self::load) keeps it.
pub(crate) struct Nccl {
    machine: Machine,
    functions: Functions,
    /// The library of the functions; none for the simulator's.
    _library: Option<libloading::Library>,
    path: PathBuf,
    version: NcclVersion,
}

const HINT: &str = "run again with NCCL_DEBUG=INFO for NCCL's own log";

impl Nccl {
    /// Loads the library at `path` and queries its version.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        // SAFETY: loading runs the library's initialisers. The path comes from the search for NCCL,
        // or from the caller, for whom the file is a trusted part of the program.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| {
            Error::Nccl(NcclError::Unusable { path: path.to_owned(), reason: error.to_string() })
        })?;
        let symbol = |name: &str| {
            // SAFETY: every symbol is an address.
            unsafe { library.get::<*mut c_void>(name) }.map_or(null_mut(), |symbol| *symbol)
        };
        // SAFETY: the symbols are NCCL's functions; the library stays loaded as long as `Nccl`.
        let functions = unsafe { Functions::load(symbol) };
        Self::new(Machine::Gpus, path, functions, Some(library))
    }

    /// Returns the simulator's NCCL, on a simulated machine.
    pub(crate) fn of(machine: &Machine) -> Option<Result<Self>> {
        let (path, functions) = machine.nccl()?;
        Some(Self::new(machine.clone(), path, functions, None))
    }

    fn new(
        machine: Machine,
        path: &Path,
        functions: Functions,
        library: Option<libloading::Library>,
    ) -> Result<Self> {
        let unusable = |reason| Error::Nccl(NcclError::Unusable { path: path.to_owned(), reason });
        let get_version =
            functions.get_version.ok_or_else(|| unusable("it has no ncclGetVersion".to_owned()))?;
        let mut code: c_int = 0;
        machine.enter();
        // SAFETY: the argument is a live int.
        let status = unsafe { get_version(&raw mut code) };
        match u32::try_from(code) {
            Ok(code) if status == SUCCESS && code > 0 => {
                let version = NcclVersion::from_code(code);
                Ok(Self { machine, functions, _library: library, path: path.to_owned(), version })
            }
            _ => Err(unusable(format!("ncclGetVersion returned {status} and version {code}"))),
        }
    }

    pub(crate) fn machine(&self) -> &Machine {
        &self.machine
    }

    #[cfg(test)]
    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns whether both are the same library, which is loaded once per path.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.path == other.path
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn version(&self) -> NcclVersion {
        self.version
    }

    /// Refuses `what` unless the library is at least of version `needs`.
    pub(crate) fn require(&self, what: &'static str, needs: NcclVersion) -> Result<()> {
        if self.version < needs { Err(self.lacks(what, needs)) } else { Ok(()) }
    }

    fn lacks(&self, what: &'static str, needs: NcclVersion) -> Error {
        let (has, path) = (self.version, self.path.clone());
        Error::Nccl(NcclError::Unsupported { what, needs, has, path })
    }

    /// Turns a result code into an error with NCCL's texts. Call it on the thread that called NCCL,
    /// before that thread calls NCCL again. `ncclInProgress` is not an error.
    pub(crate) fn check(
        &self,
        operation: &'static str,
        code: c_int,
        rank: Option<usize>,
    ) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        Err(NcclError::Failed {
            operation,
            code,
            text: self.error_text(code),
            last_error: self.last_error_text(),
            rank,
            hint: HINT,
        }
        .into())
    }

    /// Returns NCCL's text for a result code.
    pub(crate) fn error_text(&self, code: c_int) -> String {
        // SAFETY: any code is allowed; the text is a constant of the library.
        let text = unsafe { self.get_error_string(code).map(|text| text_of(text)) };
        text.unwrap_or_else(|_| "no text".to_owned())
    }

    /// Returns NCCL's text of the last error, or empty.
    pub(crate) fn last_error_text(&self) -> String {
        // SAFETY: NULL is an allowed communicator; the text belongs to the library and is copied
        // before this thread calls it again.
        let text = unsafe { self.get_last_error(null_mut()).map(|text| text_of(text)) };
        text.unwrap_or_default()
    }

    pub(crate) fn unique_id(&self) -> Result<RawUniqueId> {
        let mut id = RawUniqueId([0; 128]);
        // SAFETY: `id` is a live ncclUniqueId.
        let code = unsafe { self.get_unique_id(&raw mut id)? };
        self.check("ncclGetUniqueId", code, None)?;
        Ok(id)
    }
}

/// Copies a C string; NULL is empty.
///
/// # Safety
///
/// The pointer is NULL or a live NUL-terminated string.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not NULL, so it is a live string by this function's contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
