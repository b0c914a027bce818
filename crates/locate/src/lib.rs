//! Finds devcomm's external components: NCCL's library, device bitcode and headers, `ptxas`, and a
//! system's support for GIN.
//!
//! Every search tries the places below in order and records why it rejects a candidate. If it
//! accepts none, [`NotFound`] lists every place with the reason and says what to do.
//!
//! | order | NCCL ([`find_nccl`]) | `ptxas` ([`find_ptxas`]) |
//! |---|---|---|
//! | 1 | the explicit path | `DEVCOMM_PTXAS` |
//! | 2 | `DEVCOMM_NCCL_HOME` | `CUDA_HOME/bin` |
//! | 3 | `NCCL_HOME` | `PATH` |
//! | 4 | `nvidia/nccl` in the active Python's site-packages | site-packages |
//! | 5 | the cache that `devcomm setup` fills ([`cache_dir`]) | the cache |
//! | 6 | `LD_LIBRARY_PATH`, `/usr/local`, `/usr`, `ldconfig`'s list | `/usr/local/cuda/bin` |
//!
//! The active Python is that of `VIRTUAL_ENV`, else `python3` on `PATH`; a process that is Python
//! itself states its own by [`run_by_python`]. [`PipNccl`] says which environment has a library.
//!
//! [`find_gin_loopback`] searches next to the running program for devcomm's RMA plugin;
//! [`gin_support`] detects which GIN back ends the system supports.
//!
//! # Safety model
//!
//! There is no unsafe code here, and no library is loaded: a search returns its path. It reads
//! files and runs `python3`, `ldconfig` and the `ptxas` candidates, each with a time limit; a
//! program that is missing or exceeds the limit counts as having no output.
//!
//! # Example
//!
//! ```
//! use devcomm_locate::{NcclVersion, NcclPart, find_nccl};
//!
//! let wanted = NcclVersion { major: 2, minor: 28, patch: 0 };
//! let tree = find_nccl(None, NcclPart::Bitcode, |tree| match tree.version {
//!     Some(version) if version >= wanted => Ok(()),
//!     Some(version) => Err(format!("it is NCCL {version}, wanted {wanted} or newer")),
//!     None => Err("it has no include/nccl.h that tells its version".to_owned()),
//! });
//! match tree {
//!     Ok(tree) => println!("bitcode of NCCL {:?} in {}", tree.version, tree.root.display()),
//!     Err(not_found) => println!("{not_found}"),
//! }
//! ```

mod cache;
mod env;
mod error;
mod gin;
mod loopback;
mod nccl;
mod pip;
mod ptxas;
mod version;
mod wheel;

pub use cache::{NoCache, cache_dir, cache_dir_if_safe, wheel_dir};
pub use env::run_by_python;
pub use error::{Attempt, NotFound};
pub use gin::{GinGpus, GinRoute, GinSupport, RdmaDevice, gin_support};
pub use loopback::{find_gin_loopback, gin_loopback_environment};
pub use nccl::{FoundBy, NcclPart, NcclTree, find_nccl};
pub use pip::{PipInstall, PipNccl, quoted};
pub use ptxas::{PTXAS_MIN, find_ptxas, find_ptxas_since};
pub use version::{NCCL_VERSION, NcclVersion};
pub use wheel::{WheelFile, check_wheel, wheel_files, wheel_of};
