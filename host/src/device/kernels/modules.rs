//! Kernel modules loaded on a GPU, from a kernel set or from files.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;

use devcomm_locate::NcclVersion;
use devcomm_types::HostBody;
use parking_lot::Mutex;

use super::entry::Entry;
use super::set::KernelSet;
use super::sidecar::Sidecar;
use crate::device::context::Context;
use crate::error::{Error, LaunchError, Result};
use crate::machine::Machine;
use crate::sys::cuda::driver_version;
use crate::sys::cuda::module::{FunctionHandle, Image, LoadFailure, ModuleHandle};
use crate::sys::nccl::DEV_COMM_VERSION;

/// Loaded modules. Dropping them does not unload them: [`unload`](Self::unload) does.
#[derive(Default)]
pub(crate) struct Modules {
    /// The loaded files, by the stem of the source file.
    files: BTreeMap<String, File>,
    /// Files that were skipped because they run on one architecture only, and that architecture.
    pub(super) skipped: BTreeMap<String, String>,
    handles: Mutex<Vec<ModuleHandle>>,
    /// The set that they were loaded from.
    set: Option<KernelSet>,
    /// The entries of the kernels that were used so far, of this set and of others that its context
    /// has loaded later, by the kernels' types.
    pub(super) known: Mutex<BTreeMap<TypeId, Arc<Entry>>>,
}

struct File {
    /// The package, if the sidecar names it.
    package: Option<String>,
    entries: BTreeMap<String, Arc<Entry>>,
}

impl Modules {
    /// Loads every module of `set`; on a simulated machine one that stands for all.
    pub(super) fn load(context: &Context, set: &KernelSet) -> Result<Self> {
        let mut loaded = Self { set: Some(*set), ..Self::default() };
        if context.machine().is_simulated() {
            let module = context.cuda().simulated_module(context.machine())?;
            loaded.handles.get_mut().push(module);
            return Ok(loaded);
        }
        if set.is_without_ptx() {
            context.note_missing_ptx();
        }
        let modules = set.describe()?;
        loaded.fill(context, |loaded| {
            for module in modules {
                let (file, sidecar) = (module.file, &module.sidecar);
                let device = context.limits().compute_capability;
                if sidecar.is_arch_specific() && !sidecar.runs_on(device) {
                    loaded.skipped.insert(file.to_owned(), sidecar.arch.clone());
                    continue;
                }
                loaded.add(context, file, sidecar, || module.load(context))?;
            }
            Ok(())
        })
    }

    /// Loads modules by `load`. After an error none of them stays on the GPU.
    fn fill(
        mut self,
        context: &Context,
        load: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<Self> {
        let loaded = load(&mut self);
        if loaded.is_err() && context.cuda().bind().is_ok() {
            // SAFETY: the context is current, and no kernel was launched: nobody else has them yet.
            unsafe { self.unload() };
        }
        loaded.map(|()| self)
    }

    /// Loads modules from files, each with its sidecar beside it.
    pub(super) fn load_files<P: AsRef<Path>>(context: &Context, files: &[P]) -> Result<Self> {
        Self::default().fill(context, |loaded| {
            files.iter().try_for_each(|file| loaded.load_file(context, file.as_ref()))
        })
    }

    /// Loads a module from a file, which has its sidecar beside it.
    fn load_file(&mut self, context: &Context, path: &Path) -> Result<()> {
        let (Some(file), Some(text)) = (path.file_stem().and_then(|s| s.to_str()), path.to_str())
        else {
            return Err(Error::invalid(format!("{} is not UTF-8", path.display())));
        };
        let image = CString::new(text)
            .map_err(|_| Error::invalid(format!("{text:?} is no path: it has a NUL")))?;
        let json = std::fs::read_to_string(path.with_extension("json")).map_err(|error| {
            let why = format!("{}: {error}", path.with_extension("json").display());
            LaunchError::BadSidecar { file: file.to_owned(), why }
        })?;
        let sidecar = Sidecar::parse(file, &json)?;
        self.add(context, file, &sidecar, || {
            let loaded = context.cuda().load_module(Image::File(&image));
            loaded.map_err(|failure| refused(file, &sidecar.ptx_isa, failure))
        })
    }

    /// Checks a sidecar, calls `load` for the module that it describes, and adds its kernels.
    fn add(
        &mut self,
        context: &Context,
        file: &str,
        sidecar: &Sidecar,
        load: impl FnOnce() -> Result<ModuleHandle>,
    ) -> Result<()> {
        let stamp = checked_stamp(file, sidecar)?;
        let device = context.limits().compute_capability;
        if !sidecar.runs_on(device) {
            let (file, arch) = (file.to_owned(), sidecar.arch.clone());
            return Err(LaunchError::WrongArch { file, arch, device }.into());
        }
        let module = load()?;
        let handles = self.handles.get_mut();
        handles.push(module);
        let mut entries = BTreeMap::new();
        for kernel in &sidecar.kernels {
            let mut entry = Entry::new(handles[handles.len() - 1].function(&kernel.name)?)?;
            entry.params = Some(kernel.params.clone());
            entry.lsa_barriers = kernel.lsa_barriers;
            entry.stamp = stamp;
            entries.insert(kernel.name.clone(), Arc::new(entry));
        }
        let package = sidecar.package.clone();
        self.files.insert(file.to_owned(), File { package, entries });
        Ok(())
    }

    /// Returns whether they were loaded from `set`.
    pub(super) fn is_of(&self, set: &KernelSet) -> bool {
        self.set.is_some_and(|own| std::ptr::eq(own.modules, set.modules) && own.only == set.only)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.handles.lock().is_empty()
    }

    /// Returns the function that runs a kernel's body in Rust on a simulated machine.
    pub(super) fn bind_body(&self, context: &Context, body: &HostBody) -> Result<FunctionHandle> {
        let module = self.handles.lock().first().map(ModuleHandle::raw);
        let module = module.ok_or_else(|| Error::invalid("the kernels' module is unloaded"))?;
        context.cuda().bind_body(context.machine(), module, body)
    }

    /// Returns the entry `name` of a file of a package.
    pub(super) fn entry(&self, package: &str, file: &str, name: &str) -> Option<Arc<Entry>> {
        let file = self.files.get(file)?;
        let is_of_another = file.package.as_deref().is_some_and(|of| of != package);
        if is_of_another { None } else { file.entries.get(name).cloned() }
    }

    /// Returns the first entry `name` of any file.
    pub(super) fn entry_named(&self, name: &str) -> Option<Arc<Entry>> {
        self.files.values().find_map(|file| file.entries.get(name)).cloned()
    }

    /// Returns the names of the kernels, in order of their files.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.values().flat_map(|file| file.entries.keys().map(String::as_str))
    }

    /// Unloads them.
    ///
    /// # Safety
    ///
    /// None of the kernels runs or is launched again, and the context is current.
    pub(crate) unsafe fn unload(&self) {
        let handles = std::mem::take(&mut *self.handles.lock());
        for module in handles {
            // SAFETY: the context is current, and no kernel of the module runs: the caller's duty.
            if let Err(error) = unsafe { module.unload() } {
                tracing::warn!("{error}");
            }
        }
    }
}

/// Returns the version of NCCL's device code in a module. It must be the version whose `DevComm`
/// layout this crate uses.
fn checked_stamp(file: &str, sidecar: &Sidecar) -> Result<Option<NcclVersion>> {
    let stamp = sidecar.stamp(file)?;
    match stamp.filter(|module| *module != DEV_COMM_VERSION) {
        None => Ok(stamp),
        Some(module) => {
            let (file, layout) = (file.to_owned(), DEV_COMM_VERSION);
            Err(LaunchError::WrongNcclStamp { file, module, layout }.into())
        }
    }
}

/// Returns the error of a module that the driver has refused.
pub(super) fn refused(file: &str, ptx_isa: &str, failure: LoadFailure) -> Error {
    let file = file.to_owned();
    match failure {
        LoadFailure::Other(error) => error,
        LoadFailure::PtxTooNew => {
            let driver = driver_version(&Machine::Gpus)
                .unwrap_or_else(|_| "of an unknown version".to_owned());
            LaunchError::PtxTooNew { file, ptx: ptx_isa.to_owned(), driver }.into()
        }
        LoadFailure::Refused { error, log } => {
            LaunchError::ModuleRejected { file, name: error, log }.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_that_is_too_new_for_the_driver_names_its_version_and_what_to_do() {
        let text = refused("lsa", "9.3", LoadFailure::PtxTooNew).to_string();
        assert!(text.contains("kernel module lsa is PTX 9.3"), "{text}");
        assert!(text.contains("update the driver"), "{text}");
    }

    #[test]
    fn the_log_of_the_drivers_compiler_is_in_the_error() {
        let (error, log) =
            ("CUDA_ERROR_INVALID_PTX".to_owned(), "line 12: syntax error".to_owned());
        let text = refused("lsa", "8.6", LoadFailure::Refused { error, log }).to_string();
        assert!(text.contains("INVALID_PTX") && text.contains("line 12"), "{text}");
    }

    #[test]
    fn kernels_linked_with_another_nccl_are_refused_by_both_versions() {
        let sidecar = |nccl: &str| {
            let json = format!(
                r#"{{"arch":"sm_90","ptx_isa":"8.6","nccl":{{"version":"{nccl}"}},"kernels":[]}}"#
            );
            Sidecar::parse("lsa", &json).unwrap()
        };
        assert_eq!(checked_stamp("lsa", &sidecar("2.32.3")).unwrap(), Some(DEV_COMM_VERSION));
        for other in ["2.30.7", "2.33.0"] {
            let error = checked_stamp("lsa", &sidecar(other)).unwrap_err().to_string();
            assert!(error.contains(other) && error.contains("2.32.3"), "{error}");
        }
    }
}
