//! Finding and opening NCCL's library.

use std::collections::HashMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use devcomm_locate::{NcclPart, NcclVersion, find_nccl};
use devcomm_sys::nccl::RawUniqueId;
use parking_lot::Mutex;

use crate::error::{Error, NcclError, Result};
use crate::machine::Machine;
use crate::sys::banner::build_of;
use crate::sys::nccl::{DEV_COMM_VERSION, Nccl};

/// The oldest NCCL that can be used at all: it has host collectives and window registration.
pub const OLDEST_VERSION: NcclVersion = NcclVersion { major: 2, minor: 28, patch: 0 };

/// The shortest encryption key that NCCL takes, in bytes.
const MIN_KEY_BYTES: usize = 32;

/// What the ranks of one communicator share so as to find each other: 128 opaque bytes, made by one
/// rank.
///
/// NCCL: `ncclUniqueId`.
#[doc(alias = "ncclUniqueId")]
#[derive(Clone, Copy)]
pub struct UniqueId(pub(crate) RawUniqueId);

impl PartialEq for UniqueId {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for UniqueId {}

/// Not its bytes: who has them can join the communicator.
impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

impl UniqueId {
    /// The bytes, to be sent to the other ranks.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 128] {
        &self.0.0
    }

    /// The id that another rank made. `None` unless there are 128 bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(|bytes| Self(RawUniqueId(bytes)))
    }
}

/// A loaded NCCL library. Cheap to clone; the library stays loaded until the process ends.
#[derive(Clone)]
pub struct Library {
    nccl: Arc<Nccl>,
}

impl Library {
    /// Opens the first NCCL, in the [search order](devcomm_locate), that is new enough for device
    /// communicators.
    ///
    /// `explicit` names the root of an NCCL tree or the folder of its library, and is tried first.
    /// A simulated machine has an NCCL of its own, whatever is named.
    ///
    /// # Errors
    ///
    /// [`NcclError::NotFound`] lists every place tried; one that is too old is skipped with both
    /// versions as the reason.
    pub fn open(explicit: Option<&Path>) -> Result<Self> {
        Self::open_at_least(explicit, DEV_COMM_VERSION)
    }

    /// As [`open`](Self::open), content with `needs` or newer. What the library is too old for then
    /// fails with [`NcclError::Unsupported`] when it is used.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_at_least(explicit: Option<&Path>, needs: NcclVersion) -> Result<Self> {
        Self::open_on(&Machine::current()?, explicit, needs)
    }

    pub(crate) fn open_on(
        machine: &Machine,
        explicit: Option<&Path>,
        needs: NcclVersion,
    ) -> Result<Self> {
        if let Some(nccl) = Nccl::of(machine) {
            let library = Self { nccl: Arc::new(nccl?) };
            return library.at_least(needs).map(|()| library);
        }
        let mut opened = None;
        find_nccl(explicit, NcclPart::Library, |tree| {
            let path = tree.library.as_deref().ok_or("it has no lib/libnccl.so.2")?;
            opened = Some(Self::load_gpus(path, needs).map_err(|error| reason(&error))?);
            Ok(())
        })
        .map_err(NcclError::NotFound)?;
        opened.ok_or_else(|| Error::invalid("the search for NCCL accepted nothing"))
    }

    /// Opens this very file, searching nowhere.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unusable`] when it cannot be loaded or is no NCCL, [`NcclError::TooOld`] when
    /// it is older than `needs`; [`DriverError::NotSimulated`](crate::DriverError::NotSimulated) on
    /// a simulated machine, which has an NCCL of its own.
    pub fn load(path: &Path, needs: NcclVersion) -> Result<Self> {
        let what = || format!("the NCCL library {}", path.display());
        Machine::current()?.refuse_simulated(what)?;
        Self::load_gpus(path, needs)
    }

    fn load_gpus(path: &Path, needs: NcclVersion) -> Result<Self> {
        static LOADED: Mutex<Option<HashMap<PathBuf, Library>>> = Mutex::new(None);
        // One path is loaded once; two spellings of it are one path.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let mut loaded = LOADED.lock();
        let loaded = loaded.get_or_insert_default();
        if let Some(library) = loaded.get(&path) {
            return library.at_least(needs).map(|()| library.clone());
        }
        let library = Self { nccl: Arc::new(Nccl::load(&path)?) };
        library.at_least(needs)?;
        loaded.insert(path, library.clone());
        Ok(library)
    }

    fn at_least(&self, needs: NcclVersion) -> Result<()> {
        let has = self.version();
        if has < needs {
            return Err(NcclError::TooOld { needs, has, path: self.path().to_owned() }.into());
        }
        Ok(())
    }

    /// The file it was loaded from.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.nccl.path()
    }

    /// Its version. NCCL: `ncclGetVersion`.
    #[doc(alias = "ncclGetVersion")]
    #[must_use]
    pub fn version(&self) -> NcclVersion {
        self.nccl.version()
    }

    /// What is known of the library, in full: where it is, its version, which CUDA it was built
    /// with. Reads through the library's file.
    #[must_use]
    pub fn versions(&self) -> Versions {
        Versions {
            path: self.path().to_owned(),
            version: self.version(),
            build: build_of(self.path()),
        }
    }

    /// NCCL's text for a result code (`ncclResult_t`).
    ///
    /// NCCL: `ncclGetErrorString`.
    #[doc(alias = "ncclGetErrorString")]
    #[must_use]
    pub fn error_string(&self, code: i32) -> String {
        self.nccl.error_text(code)
    }

    /// What NCCL said of the last thing that failed in this process; `None` if nothing has.
    /// [`Error::Nccl`] carries it already.
    ///
    /// NCCL: `ncclGetLastError`.
    #[doc(alias = "ncclGetLastError")]
    #[must_use]
    pub fn last_error(&self) -> Option<String> {
        Some(self.nccl.last_error_text()).filter(|text| !text.is_empty())
    }

    /// Encrypts what NCCL sends over its TCP sockets (TLS with a key that all processes share), or,
    /// with `None`, no more. To be called in every process before the first unique id and the first
    /// communicator. The key has at least 32 bytes.
    ///
    /// NCCL: `ncclSetEncryption`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a key that is too short or has a NUL in it,
    /// [`NcclError::Unsupported`] on a library older than 2.32.3, [`Error::Nccl`].
    #[doc(alias = "ncclSetEncryption")]
    #[doc(alias = "ncclEncryptionConfig_t")]
    pub fn set_encryption(&self, key: Option<&str>) -> Result<()> {
        let key = key.map(|key| match CString::new(key) {
            Ok(text) if key.len() >= MIN_KEY_BYTES => Ok(text),
            Ok(_) => Err(Error::invalid(format!(
                "the encryption key has {} bytes, NCCL wants at least {MIN_KEY_BYTES}",
                key.len()
            ))),
            Err(_) => {
                Err(Error::invalid("the encryption key has a NUL in it, which ends C's strings"))
            }
        });
        self.nccl.encrypt(key.transpose()?.as_deref())
    }

    /// Makes the id of a new communicator; NCCL starts a thread in this process that the ranks then
    /// contact.
    ///
    /// NCCL: `ncclGetUniqueId`.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`], for example without a usable network interface.
    #[doc(alias = "ncclGetUniqueId")]
    pub fn unique_id(&self) -> Result<UniqueId> {
        self.nccl.unique_id().map(UniqueId)
    }

    pub(crate) fn nccl(&self) -> &Arc<Nccl> {
        &self.nccl
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NCCL {} ({})", self.version(), self.path().display())
    }
}

/// What is known of a library; shown as one line. Made by [`Library::versions`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Versions {
    /// The file.
    pub path: PathBuf,
    /// The version that it reports.
    pub version: NcclVersion,
    /// Version, suffix and CUDA as it prints them, `2.32.3+cuda13.4`; `None` if the file does not
    /// say.
    pub build: Option<String>,
}

impl Versions {
    /// The CUDA version it was built with, `13.4`.
    #[must_use]
    pub fn cuda(&self) -> Option<&str> {
        self.build.as_deref()?.split_once("+cuda").map(|(_, cuda)| cuda)
    }
}

impl std::fmt::Display for Versions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.build {
            Some(build) => write!(f, "NCCL {build}")?,
            None => write!(f, "NCCL {}", self.version)?,
        }
        write!(f, ", {}", self.path.display())
    }
}

/// The reason in a list whose entry already names the place.
fn reason(error: &Error) -> String {
    match error {
        Error::Nccl(NcclError::TooOld { needs, has, .. }) => {
            format!("it is NCCL {has}, needed is {needs} or newer")
        }
        Error::Nccl(NcclError::Unusable { reason, .. }) => reason.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
#[path = "library_tests.rs"]
mod tests;
