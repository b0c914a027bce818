//! Finds and opens the NCCL library.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use devcomm_locate::{FoundBy, NcclPart, NcclTree, NcclVersion, find_nccl};
use devcomm_sys::nccl::RawUniqueId;
use parking_lot::Mutex;

use super::config::Loaded;
use crate::error::{Error, NcclError, Result, renewal};
use crate::machine::Machine;
use crate::sys::banner::build_of;
use crate::sys::nccl::{DEV_COMM_VERSION, Nccl};
use crate::sys::process::file_of_global;

/// The oldest supported NCCL: it has host collectives and window registration.
pub const OLDEST_VERSION: NcclVersion = NcclVersion { major: 2, minor: 28, patch: 0 };

/// The shortest encryption key that NCCL accepts, in bytes.
const MIN_KEY_BYTES: usize = 32;

/// The libraries that were loaded here.
static LOADED: Mutex<BTreeMap<PathBuf, Library>> = Mutex::new(BTreeMap::new());

/// Why a tree is not used, in the list of [`NcclError::NotFound`].
const NO_LIBRARY: &str = "it has no lib/libnccl.so.2";

/// The 128 opaque bytes with which the ranks of one communicator find each other, created by one
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

/// Hides the bytes, because any process that has them can join the communicator.
impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

impl UniqueId {
    /// Size in bytes. NCCL: `NCCL_UNIQUE_ID_BYTES`.
    #[doc(alias = "NCCL_UNIQUE_ID_BYTES")]
    pub const BYTES: usize = 128;

    /// Returns the bytes, to be sent to the other ranks.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0.0
    }

    /// Returns the id that another rank created, from its bytes. `None` unless there are 128.
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
    /// communicators. If another part of the program, such as PyTorch, has loaded an NCCL, this
    /// opens that one.
    ///
    /// `explicit` names the root of an NCCL tree or the folder of its library, and is tried first.
    /// On a simulated machine this is the simulated NCCL, whatever `explicit` names.
    ///
    /// # Errors
    ///
    /// [`NcclError::NotFound`] lists every path tried and why it was not used, for example because
    /// its version is too old. [`NcclError::TwoLibraries`] if `explicit` or `DEVCOMM_NCCL_HOME`
    /// names another library than the one that is loaded, [`NcclError::TooOld`] if the loaded one
    /// is.
    pub fn open(explicit: Option<&Path>) -> Result<Self> {
        Self::open_at_least(explicit, DEV_COMM_VERSION)
    }

    /// Does the same as [`open`](Self::open), for version `needs` or newer. A call that needs a
    /// newer library fails with [`NcclError::Unsupported`] when it is used.
    ///
    /// # Errors
    ///
    /// The errors are those of [`open`](Self::open).
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
        if let Some(loaded) = loaded_by_others() {
            return Self::adopt(loaded, explicit, needs);
        }
        let mut opened = None;
        find_nccl(explicit, NcclPart::Library, |tree| {
            let path = tree.library.as_deref().ok_or(NO_LIBRARY)?;
            opened = Some(Self::load_real(path, needs).map_err(|error| reason(&error))?);
            Ok(())
        })
        .map_err(NcclError::NotFound)?;
        opened.ok_or_else(|| Error::invalid("the search for NCCL accepted nothing"))
    }

    /// Opens the library that another part of the program has loaded, unless another one is named.
    fn adopt(loaded: PathBuf, explicit: Option<&Path>, needs: NcclVersion) -> Result<Self> {
        let mut named = None;
        let is_named = |tree: &NcclTree| {
            let is_explicit = matches!(tree.found_by, FoundBy::Explicit | FoundBy::DevcommNcclHome);
            let path = tree.library.as_deref().filter(|_| is_explicit).ok_or(NO_LIBRARY)?;
            named = Some(canonical(path));
            Ok(())
        };
        // The search calls `is_named`, which sets `named`. Its own result is not used.
        let _ = find_nccl(explicit, NcclPart::Library, is_named);
        match named {
            Some(named) if named != loaded => Err(NcclError::TwoLibraries { loaded, named }.into()),
            _ => Self::load_real(&loaded, needs),
        }
    }

    /// Opens this file, without a search.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unusable`] if it cannot be loaded or is not NCCL, [`NcclError::TooOld`] if it
    /// is older than `needs`; [`DriverError::NotSimulated`](crate::DriverError::NotSimulated) on a
    /// simulated machine, which uses the simulated NCCL.
    pub fn load(path: &Path, needs: NcclVersion) -> Result<Self> {
        let what = || format!("the NCCL library {}", path.display());
        Machine::current()?.refuse_simulated(what)?;
        Self::load_real(path, needs)
    }

    fn load_real(path: &Path, needs: NcclVersion) -> Result<Self> {
        // Each file is loaded once, whatever the spelling of its path.
        let path = canonical(path);
        let mut loaded = LOADED.lock();
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

    /// Returns the file it was loaded from.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.nccl.path()
    }

    /// Returns its version. NCCL: `ncclGetVersion`.
    #[doc(alias = "ncclGetVersion")]
    #[must_use]
    pub fn version(&self) -> NcclVersion {
        self.nccl.version()
    }

    pub(crate) fn loaded(&self) -> Loaded<'_> {
        Loaded { version: self.version(), path: self.path() }
    }

    /// Returns the library's path, its version and the CUDA version it was built with. Reads the
    /// library's file.
    #[must_use]
    pub fn versions(&self) -> Versions {
        Versions {
            path: self.path().to_owned(),
            version: self.version(),
            build: build_of(self.path()),
        }
    }

    /// Returns NCCL's text for a result code (`ncclResult_t`).
    ///
    /// NCCL: `ncclGetErrorString`.
    #[doc(alias = "ncclGetErrorString")]
    #[must_use]
    pub fn error_string(&self, code: i32) -> String {
        self.nccl.error_text(code)
    }

    /// Returns NCCL's message about the last failure in this process; `None` if nothing has failed.
    /// [`Error::Nccl`] includes it.
    ///
    /// NCCL: `ncclGetLastError`.
    #[doc(alias = "ncclGetLastError")]
    #[must_use]
    pub fn last_error(&self) -> Option<String> {
        Some(self.nccl.last_error_text()).filter(|text| !text.is_empty())
    }

    /// Encrypts what NCCL sends over its TCP sockets (TLS with a key that all processes share);
    /// `None` turns encryption off. Call it in every process before the first unique id and the
    /// first communicator. The key has at least 32 bytes.
    ///
    /// NCCL: `ncclSetEncryption`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a key that is too short or contains a NUL,
    /// [`NcclError::Unsupported`] on a library older than 2.32.3, [`Error::Nccl`].
    #[doc(alias = "ncclSetEncryption")]
    #[doc(alias = "ncclEncryptionConfig_t")]
    pub fn set_encryption(&self, key: Option<&str>) -> Result<()> {
        let key = key.map(|key| match CString::new(key) {
            Ok(text) if key.len() >= MIN_KEY_BYTES => Ok(text),
            Ok(_) => Err(Error::invalid(format!(
                "the encryption key has {} bytes, NCCL needs at least {MIN_KEY_BYTES}",
                key.len()
            ))),
            Err(_) => Err(Error::invalid("the encryption key contains a NUL")),
        });
        self.nccl.encrypt(key.transpose()?.as_deref())
    }

    /// Creates the id of a new communicator; NCCL starts a thread in this process that the ranks
    /// then contact.
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

/// A library's path and versions, from [`Library::versions`]; displayed as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Versions {
    /// The file.
    pub path: PathBuf,
    /// The version that the library reports.
    pub version: NcclVersion,
    /// Version, suffix and CUDA version as NCCL prints them, such as `2.32.3+cuda13.4`; `None` if
    /// the file does not contain them.
    pub build: Option<String>,
}

impl Versions {
    /// Returns the CUDA version that the library was built with, such as `13.4`.
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

fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Returns the NCCL library that another part of the program uses.
fn loaded_by_others() -> Option<PathBuf> {
    // If a library has global symbols (RTLD_GLOBAL), other code calls these, even if it has loaded
    // another library too.
    if let Some(path) = file_of_global(c"ncclGetVersion") {
        return Some(canonical(&path));
    }
    // Locked, because `load_real` maps a library before it is in the list.
    let own = LOADED.lock();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    // A line ends with the path of the mapped file, and says whether that was deleted since.
    let files = maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]));
    let files = files.map(|path| Path::new(path.trim_end_matches(" (deleted)")));
    let is_nccl = |path: &&Path| {
        let name = path.file_name().map(|name| name.to_string_lossy());
        name.is_some_and(|name| name == "libnccl.so" || name.starts_with("libnccl.so."))
    };
    files.filter(is_nccl).map(canonical).find(|path| !own.contains_key(path))
}

/// Returns the reason for a list entry that already names the path.
fn reason(error: &Error) -> String {
    match error {
        Error::Nccl(NcclError::TooOld { needs, has, path }) => {
            let renewal = renewal(path, *needs).map(|text| format!("; {text}")).unwrap_or_default();
            format!("it is NCCL {has}, needed is {needs} or newer{renewal}")
        }
        Error::Nccl(NcclError::Unusable { reason, .. }) => reason.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
#[path = "library_tests.rs"]
mod tests;
