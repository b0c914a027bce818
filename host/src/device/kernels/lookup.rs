//! Finds the entry of a kernel: in a loaded module or, on a simulated machine, its body in Rust.

use std::any::TypeId;
use std::sync::Arc;

use devcomm_types::{DevComm, Dim3, GinType, HostBody, Kernel, KernelArgs, LaunchConfig};

use super::{Entry, Modules, shape_of};
use crate::device::context::Context;
use crate::device::launch::{FunctionInfo, check_dev_comm, check_gin};
use crate::error::{DriverError, Error, LaunchError, LaunchRefusal, Result};

/// A [`Kernel`] as a value, so that the code that handles it is not generic; or a kernel of which
/// only the name is known.
pub(super) struct KernelDesc<'a> {
    /// `None` for one that is known by name.
    source: Option<Source>,
    pub(super) name: &'static str,
    gin: bool,
    body: Option<HostBody>,
    /// The size of each parameter in bytes.
    pub(super) params: &'a [usize],
    pub(super) takes_dev_comm: bool,
}

/// A kernel's type, and where it was compiled.
struct Source {
    id: TypeId,
    package: &'static str,
    file: &'static str,
}

impl KernelDesc<'static> {
    pub(super) fn new<K: Kernel>() -> Self {
        Self {
            source: Some(Source { id: TypeId::of::<K>(), package: K::PACKAGE, file: K::FILE }),
            name: K::NAME,
            gin: K::GIN,
            body: K::BODY,
            params: <K::Args as KernelArgs>::SIZES,
            takes_dev_comm: <K::Args as KernelArgs>::TAKES_DEV_COMM,
        }
    }
}

impl<'a> KernelDesc<'a> {
    /// Returns the kernel of this name in any module. `gin`: it has an entry for each back end.
    pub(super) fn named(
        name: &'static str,
        gin: bool,
        params: &'a [usize],
        takes_dev_comm: bool,
    ) -> Self {
        Self { source: None, name, gin, body: None, params, takes_dev_comm }
    }

    /// Returns the error of a refused launch.
    pub(super) fn refuse(&self, refusal: LaunchRefusal) -> Error {
        LaunchError::Refused { kernel: self.name, refusal }.into()
    }
}

/// The modules that a launch looks its kernel up in.
pub(super) struct Loaded<'a> {
    pub(super) context: &'a Context,
    pub(super) modules: &'a [Arc<Modules>],
}

impl Loaded<'_> {
    /// Returns the most that any entry of a kernel uses.
    pub(super) fn info(&self, kernel: &KernelDesc<'_>) -> Result<FunctionInfo> {
        let infos = self.entries_of(kernel)?.into_iter().map(|entry| entry.info);
        infos.reduce(FunctionInfo::most).ok_or_else(|| self.not_found(kernel))
    }

    /// Returns the largest grid whose blocks are all resident, whichever entry is launched.
    pub(super) fn resident_blocks(
        &self,
        kernel: &KernelDesc<'_>,
        block: u32,
        dynamic_shared: u32,
    ) -> Result<u32> {
        let mut per_multiprocessor = u32::MAX;
        for entry in self.entries_of(kernel)? {
            // The smallest grid that is allowed: occupancy depends on the block alone.
            let grid = entry.info.cluster.unwrap_or(Dim3::from(1));
            let config = LaunchConfig::new(grid, block).with_dynamic_shared(dynamic_shared);
            let blocks = entry.prepare(self.context, kernel.name, &config)?.blocks()?;
            per_multiprocessor = per_multiprocessor.min(blocks);
        }
        Ok(per_multiprocessor.saturating_mul(self.context.limits().multiprocessors))
    }

    /// Returns the number of clusters that are all resident, whichever entry is launched.
    pub(super) fn resident_clusters(
        &self,
        kernel: &KernelDesc<'_>,
        cluster: u32,
        block: u32,
        dynamic_shared: u32,
    ) -> Result<u32> {
        let config = LaunchConfig::new(cluster, block).with_dynamic_shared(dynamic_shared);
        let config = config.with_cluster(cluster);
        let mut clusters = u32::MAX;
        for entry in self.entries_of(kernel)? {
            let prepared = entry.prepare(self.context, kernel.name, &config)?;
            let cooperative = false;
            let shape = shape_of(&config, cooperative);
            clusters = clusters.min(prepared.clusters(cluster, &shape)?);
        }
        Ok(clusters)
    }

    /// Returns the entry to launch with this device communicator; a GIN kernel has one per back
    /// end.
    pub(super) fn entry_for(
        &self,
        kernel: &KernelDesc<'_>,
        comm: Option<&DevComm>,
    ) -> Result<Arc<Entry>> {
        let refuse = |refusal| kernel.refuse(refusal);
        let back_end = || check_dev_comm(comm).and_then(check_gin).map_err(refuse);
        let back_end = kernel.gin.then(back_end).transpose()?;
        let simulated = self.context.machine().is_simulated();
        let Some(back_end) = back_end.filter(|_| !simulated) else {
            return self.known_entry(kernel);
        };
        self.gin_entry(kernel, back_end).ok_or_else(|| {
            let entries: Vec<_> = GinType::BACK_ENDS
                .into_iter()
                .filter(|&other| self.gin_entry(kernel, other).is_some())
                .collect();
            match entries[..] {
                [] => self.not_found(kernel),
                _ => refuse(LaunchRefusal::NoGinEntry { entries, dev_comm: back_end }),
            }
        })
    }

    /// Returns all entries, at least one.
    fn entries_of(&self, kernel: &KernelDesc<'_>) -> Result<Vec<Arc<Entry>>> {
        if !kernel.gin || self.context.machine().is_simulated() {
            return Ok(vec![self.known_entry(kernel)?]);
        }
        let back_ends = GinType::BACK_ENDS.into_iter();
        let entries: Vec<_> = back_ends.filter_map(|b| self.gin_entry(kernel, b)).collect();
        if entries.is_empty() { Err(self.not_found(kernel)) } else { Ok(entries) }
    }

    /// Returns the entry of a kernel that has one: looked up at its first launch. On a simulated
    /// machine that is every kernel; kernel sets are not read there, but at least one must be
    /// loaded, as on GPUs.
    fn known_entry(&self, kernel: &KernelDesc<'_>) -> Result<Arc<Entry>> {
        let Some(Source { id, .. }) = kernel.source else {
            return self.entry(kernel, kernel.name).ok_or_else(|| self.not_found(kernel));
        };
        // The first set keeps the entries of kernels of all sets.
        let modules = self.modules.first().ok_or_else(|| self.not_found(kernel))?;
        let known = modules.known.lock().get(&id).cloned();
        if let Some(entry) = known {
            return Ok(entry);
        }
        let entry = match self.context.machine().is_simulated() {
            true => self.simulated_entry(kernel, modules)?,
            false => self.entry(kernel, kernel.name).ok_or_else(|| self.not_found(kernel))?,
        };
        // Another thread may have looked it up meanwhile.
        Ok(Arc::clone(modules.known.lock().entry(id).or_insert(entry)))
    }

    /// Returns a new entry on a simulated machine.
    fn simulated_entry(&self, kernel: &KernelDesc<'_>, modules: &Modules) -> Result<Arc<Entry>> {
        let body = kernel.body.ok_or_else(|| DriverError::NotSimulated {
            what: format!("the kernel `{}`, which has no body in Rust,", kernel.name),
        })?;
        let function = modules.bind_body(self.context, &body)?;
        let mut entry = Entry::new(function)?;
        entry.lsa_barriers = body.lsa_barriers();
        Ok(Arc::new(entry))
    }

    fn gin_entry(&self, kernel: &KernelDesc<'_>, back_end: GinType) -> Option<Arc<Entry>> {
        self.entry(kernel, &format!("{}_{}", kernel.name, back_end.suffix()?))
    }

    fn entry(&self, kernel: &KernelDesc<'_>, name: &str) -> Option<Arc<Entry>> {
        self.modules.iter().find_map(|modules| match &kernel.source {
            Some(Source { package, file, .. }) => modules.entry(package, file, name),
            None => modules.entry_named(name),
        })
    }

    fn not_found(&self, kernel: &KernelDesc<'_>) -> Error {
        let file = kernel.source.as_ref().map_or("", |source| source.file);
        if let Some(arch) = self.modules.iter().find_map(|m| m.skipped.get(file)) {
            let (file, arch) = (file.to_owned(), arch.clone());
            let device = self.context.limits().compute_capability;
            return LaunchError::WrongArch { file, arch, device }.into();
        }
        let names = self.modules.iter().flat_map(|modules| modules.names());
        let available = names.map(str::to_owned).collect();
        LaunchError::KernelNotFound { name: kernel.name.to_owned(), available }.into()
    }
}
