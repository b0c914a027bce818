//! GIN without an RDMA card: the environment variables that enable devcomm's plugin for NCCL.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use devcomm_locate::{find_gin_loopback, gin_loopback_environment, gin_support};

use crate::error::{Error, Result, WorldError};
use crate::machine::Machine;
use crate::sys::process::set_variables;

/// GIN between the GPUs of one host without an RDMA card: a plugin for NCCL performs GIN PROXY
/// operations by CUDA copies, and kernels that use the network run unchanged. It is for development
/// and tests; its speed tells nothing about a network's.
///
/// The plugin is `libdevcomm_rma_loopback.so`, which cargo builds with any program that depends on
/// `devcomm`. NCCL and the CUDA driver read the settings once, so a program makes them before it
/// starts threads and before anything uses a GPU; [`World::builder`](crate::World::builder) does
/// this in the right order.
///
/// ```no_run
/// use devcomm_host::{Error, GinLoopback, World};
///
/// # fn main() -> Result<(), Error> {
/// let world = World::builder().gin_loopback(GinLoopback::new()).from_env()?;
/// world.run(|rank| {
///     let comm = rank.communicator()?;
///     println!("GIN here: {}", comm.properties()?.gin_type); // PROXY
///     Ok::<_, Error>(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// Any other program, in any language, can use the plugin through the same environment variables;
/// `cargo xtask doctor` prints them.
#[derive(Clone, Debug, Default)]
pub struct GinLoopback {
    plugin: Option<PathBuf>,
    lsa_team_size: Option<usize>,
    unless_rdma: bool,
}

impl GinLoopback {
    /// Uses the plugin in the folder of the program's file, or the one that `DEVCOMM_GIN_LOOPBACK`
    /// names.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Does the same as [`new`](Self::new), but only if the host has no RDMA device. If it has one,
    /// only [`lsa_team_size`](Self::lsa_team_size) has an effect.
    #[must_use]
    pub fn unless_rdma() -> Self {
        Self { unless_rdma: true, ..Self::default() }
    }

    /// Uses the plugin at this path.
    #[must_use]
    pub fn plugin(mut self, path: impl Into<PathBuf>) -> Self {
        self.plugin = Some(path.into());
        self
    }

    /// Splits the world into LSA teams of `ranks` ranks, a divisor of the world's size, as if there
    /// were several NVLink domains: communication between teams then uses the network. 4 GPUs with
    /// teams of 2 are 2 teams and 2 rails. NCCL: `NCCL_LSA_TEAM_SIZE`.
    #[must_use]
    pub fn lsa_team_size(mut self, ranks: usize) -> Self {
        self.lsa_team_size = Some(ranks);
        self
    }

    pub(crate) fn team_size(&self) -> Option<usize> {
        self.lsa_team_size
    }

    /// Returns the environment variables that a process needs.
    ///
    /// # Errors
    ///
    /// [`WorldError::GinLoopbackNotFound`] lists the paths that were searched;
    /// [`Error::InvalidInput`] for teams of 0 ranks.
    pub fn environment(&self) -> Result<Vec<(&'static str, OsString)>> {
        if self.lsa_team_size == Some(0) {
            return Err(Error::invalid("LSA teams of 0 ranks"));
        }
        let mut variables = Vec::new();
        if !(self.unless_rdma && gin_support(None).has_rdma()) {
            let plugin = find_gin_loopback(self.plugin.as_deref())
                .map_err(|not_found| Error::World(WorldError::GinLoopbackNotFound { not_found }))?;
            variables.extend(gin_loopback_environment(&plugin).map(|(n, v)| (n, v.into())));
        }
        let teams = self.lsa_team_size.map(|ranks| ranks.to_string().into());
        variables.extend(teams.map(|ranks| ("NCCL_LSA_TEAM_SIZE", ranks)));
        Ok(variables)
    }

    /// Sets [these variables](Self::environment) in this process, for a program that builds no
    /// [`World`](crate::World). Values of tuning variables that the user has set are kept. Does
    /// nothing on a simulated machine.
    ///
    /// # Errors
    ///
    /// The errors are those of [`environment`](Self::environment); [`WorldError::EnvironmentInUse`]
    /// when this process has other threads, which may be reading the environment;
    /// [`WorldError::Environment`] when a variable selects another network or other teams.
    pub fn enable(&self) -> Result<()> {
        if Machine::from_env(self.lsa_team_size)?.is_some() {
            return Ok(());
        }
        let mut missing = Vec::new();
        for (name, value) in self.environment()? {
            match std::env::var_os(name) {
                None => missing.push((name, value)),
                Some(set) if set == value || !contradicts(name) || same_file(&set, &value) => {}
                Some(set) => {
                    let why = format!("GinLoopback needs {} here; unset it", value.display());
                    let value = Some(set.to_string_lossy().into_owned());
                    return Err(WorldError::Environment { variable: name, value, why }.into());
                }
            }
        }
        set_variables(&missing)
    }
}

/// Returns whether two paths are of the same file.
fn same_file(a: &OsStr, b: &OsStr) -> bool {
    std::fs::canonicalize(a).is_ok_and(|a| std::fs::canonicalize(b).is_ok_and(|b| a == b))
}

/// Returns whether a different value of this variable selects another network or other teams.
fn contradicts(name: &str) -> bool {
    matches!(name, "NCCL_RMA_PLUGIN" | "NCCL_GIN_TYPE" | "NCCL_LSA_TEAM_SIZE")
}
