//! A loaded NCCL library: its functions behind version gates, its errors, and calls as values.

pub(crate) mod abi;
#[cfg(test)]
mod abi_tests;
pub(crate) mod batch;
pub(crate) mod call;
pub(crate) mod calls;
pub(crate) mod functions;
pub(crate) mod lists;
pub(crate) mod lists_config;
pub(crate) mod params;
pub(crate) mod query;

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use devcomm_locate::NcclVersion;

use self::abi::{IN_PROGRESS, RawUniqueId, SUCCESS};
use self::functions::Slots;
use crate::{Error, Result};

/// NCCL's library. Once one is in use it stays loaded for the life of the process: NCCL keeps
/// threads of its own running in it.
pub(crate) struct Nccl {
    library: libloading::Library,
    path: PathBuf,
    version: NcclVersion,
    slots: Slots,
}

const HINT: &str = "run again with NCCL_DEBUG=INFO for NCCL's own log";

impl Nccl {
    /// Loads the library at `path` and asks its version; nothing of it is initialised.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let unusable = |reason: String| Error::NcclUnusable { path: path.to_owned(), reason };
        // SAFETY: loading runs the library's initialisers. The path comes from the search for NCCL
        // or from the caller, who vouches for the file as for any code of the program.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|error| unusable(error.to_string()))?;
        let mut code: c_int = 0;
        let status = {
            // SAFETY: the prototype of ncclGetVersion has been this one since NCCL 2.3.
            let get_version = unsafe {
                library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0")
            };
            let get_version =
                get_version.map_err(|_| unusable("it has no ncclGetVersion".to_owned()))?;
            // SAFETY: the argument is a live int.
            unsafe { get_version(&raw mut code) }
        };
        match u32::try_from(code) {
            Ok(code) if status == SUCCESS && code > 0 => Ok(Self {
                library,
                path: path.to_owned(),
                version: NcclVersion::from_code(code),
                slots: Slots::default(),
            }),
            _ => Err(unusable(format!("ncclGetVersion returned {status} and version {code}"))),
        }
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
        Error::Unsupported { what, needs, has: self.version }
    }

    /// Looks up a function.
    ///
    /// # Safety
    ///
    /// `F` is a function pointer of the symbol's C prototype.
    pub(crate) unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.library.get::<F>(name) }.ok().map(|symbol| *symbol)
    }

    /// Turns a result code into an error with everything that NCCL says about it. To be called on the thread that made the
    /// call, before it makes another. A call that goes on in the background is no error.
    pub(crate) fn check(
        &self,
        operation: &'static str,
        code: c_int,
        rank: Option<usize>,
    ) -> Result<()> {
        if code == SUCCESS || code == IN_PROGRESS {
            return Ok(());
        }
        Err(Error::Nccl {
            operation,
            code,
            text: self.error_text(code),
            last_error: self.last_error_text(),
            rank,
            hint: HINT,
        })
    }

    /// NCCL's text for a result code.
    pub(crate) fn error_text(&self, code: c_int) -> String {
        // SAFETY: any code is allowed; the text is a constant of the library.
        let text = unsafe { self.get_error_string(code).map(|text| text_of(text)) };
        text.unwrap_or_else(|_| "no text".to_owned())
    }

    /// NCCL's text of the last error, or empty.
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
    // SAFETY: not NULL, so by the caller's word a live string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
