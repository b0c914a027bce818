//! Loading compiled kernels and launching them.

mod entry;
mod lookup;
mod set;
mod sidecar;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use devcomm_locate::NcclVersion;
use devcomm_types::{DevComm, Kernel, KernelArgs, LaunchArgs, LaunchConfig};

use self::entry::Entry;
use self::lookup::Wanted;
pub use self::set::{KernelSet, ModuleSource};
use self::sidecar::{Sidecar, check_params};
use super::abort::AbortFlag;
use super::context::Context;
use super::launch::{FunctionInfo, check_communicating, check_dev_comm};
use super::stream::Stream;
use crate::error::{Error, LaunchError, LaunchRefusal, Result};
use crate::machine::Machine;
use crate::sys::cuda::driver_version;
use crate::sys::cuda::module::{Image, LoadFailure, ModuleHandle, Shape};
use crate::sys::nccl::DEV_COMM_VERSION;

/// The kernels of a [`KernelSet`] or of files, loaded on one rank's GPU.
///
/// All of them are loaded at once, completely: a load while a kernel waits for another rank would
/// wait for that kernel.
///
/// A simulated machine runs a kernel's body in Rust, compiled into the program: nothing is loaded
/// there, and a kernel that has none (one of another language, say) is refused at its launch.
pub struct Kernels {
    entries: BTreeMap<String, BTreeMap<String, Rc<Entry>>>,
    /// Those of a simulated machine that were used so far, by file and name.
    bound: RefCell<BTreeMap<(&'static str, &'static str), Rc<Entry>>>,
    /// Files that were not loaded because they are bound to another architecture, and to which.
    left_out: BTreeMap<String, String>,
    modules: Vec<ModuleHandle>,
    context: Context,
}

/// A launch that was checked.
struct Ready {
    entry: Rc<Entry>,
    shape: Shape,
    /// The abort flag of its device communicator.
    flag: Option<Arc<AbortFlag>>,
}

impl Kernels {
    /// Loads every module of `set` on the context's GPU. One that is bound to another architecture
    /// (`sm_90a`, on another GPU than Hopper) is left out, and a launch of its kernels is
    /// [`LaunchError::WrongArch`].
    ///
    /// # Errors
    ///
    /// [`LaunchError::KernelsUnavailable`] when the program was built without kernels,
    /// [`LaunchError::BadSidecar`], [`LaunchError::WrongNcclStamp`], [`LaunchError::WrongArch`],
    /// [`LaunchError::PtxTooNew`], [`LaunchError::ModuleRejected`] with the log of the driver's
    /// compiler.
    pub fn load(context: &Context, set: &KernelSet) -> Result<Self> {
        // From here on a failure drops what was loaded so far.
        let mut kernels = Self::none(context);
        if context.machine().is_simulated() {
            return Ok(kernels);
        }
        let described = set.describe()?;
        for (file, ptx, sidecar) in described {
            if sidecar.is_bound() && !sidecar.runs_on(context.limits().compute_capability) {
                kernels.left_out.insert(file.to_owned(), sidecar.arch);
                continue;
            }
            let image = CString::new(ptx).map_err(|_| holds_nul(file))?;
            kernels.load_module(file, Image::Ptx(&image), sidecar)?;
        }
        Ok(kernels)
    }

    /// The context that they were loaded by.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Loads modules from files on the context's GPU: each a cubin, or anything else that the
    /// driver takes, with the description that the kernel build writes beside it (`sum.json` beside
    /// `sum.cubin`).
    ///
    /// A file's stem stands for [`Kernel::FILE`], so that another build of a kernel, in another
    /// language too, is launched under the type of the first.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load); [`LaunchError::BadSidecar`] when there is no description,
    /// [`Error::InvalidInput`] for a path that is not text;
    /// [`DriverError::NotSimulated`](crate::DriverError::NotSimulated) on a simulated machine.
    pub fn load_files<P: AsRef<Path>>(context: &Context, files: &[P]) -> Result<Self> {
        if let Some(first) = files.first() {
            let what = || format!("the machine code of {}", first.as_ref().display());
            context.machine().refuse_simulated(what)?;
        }
        let mut kernels = Self::none(context);
        for path in files.iter().map(AsRef::as_ref) {
            let (Some(file), Some(text)) =
                (path.file_stem().and_then(|s| s.to_str()), path.to_str())
            else {
                return Err(Error::invalid(format!("{} is not text", path.display())));
            };
            let image = CString::new(text).map_err(|_| holds_nul(file))?;
            let json = std::fs::read_to_string(path.with_extension("json")).map_err(|error| {
                let why = format!("{}: {error}", path.with_extension("json").display());
                Error::Launch(LaunchError::BadSidecar { file: file.to_owned(), why })
            })?;
            kernels.load_module(file, Image::File(&image), Sidecar::parse(file, &json)?)?;
        }
        Ok(kernels)
    }

    fn none(context: &Context) -> Self {
        let (entries, bound, left_out, modules) = Default::default();
        Self { entries, bound, left_out, modules, context: context.clone() }
    }

    fn load_module(&mut self, file: &str, image: Image<'_>, sidecar: Sidecar) -> Result<()> {
        let stamp = checked_stamp(file, &sidecar)?;
        let device = self.context.limits().compute_capability;
        if !sidecar.runs_on(device) {
            let (file, arch) = (file.to_owned(), sidecar.arch);
            return Err(LaunchError::WrongArch { file, arch, device }.into());
        }
        let module = match self.context.cuda().load_module(image) {
            Ok(module) => module,
            Err(failure) => return Err(refused(file, &sidecar.ptx_isa, failure)),
        };
        let entries = self.entries.entry(file.to_owned()).or_default();
        for kernel in sidecar.kernels {
            let mut entry = Entry::new(module.function(&kernel.name)?)?;
            entry.params = Some(kernel.params);
            entry.lsa_barriers = kernel.lsa_barriers;
            entry.stamp = stamp;
            entries.insert(kernel.name, Rc::new(entry));
        }
        self.modules.push(module);
        Ok(())
    }

    /// The names of the loaded kernels, in order of their files; none on a simulated machine.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.values().flat_map(|entries| entries.keys().map(String::as_str))
    }

    /// What a kernel uses, as the driver compiled it; of a kernel for GIN, the most that one of its
    /// entries uses.
    ///
    /// # Errors
    ///
    /// [`LaunchError::KernelNotFound`].
    pub fn info<K: Kernel>(&self, _kernel: K) -> Result<FunctionInfo> {
        let wanted = Wanted::new::<K>();
        let infos = self.entries_of(&wanted)?.into_iter().map(|entry| entry.info);
        infos.reduce(FunctionInfo::most).ok_or_else(|| self.not_found(&wanted))
    }

    /// The largest grid of such blocks that runs all at once, as a kernel that takes a `DevComm`
    /// must; of a kernel for GIN, with any of its entries.
    ///
    /// # Errors
    ///
    /// [`LaunchError::KernelNotFound`], [`LaunchError::Refused`] when such a block cannot run at
    /// all, the driver's.
    pub fn resident_blocks<K: Kernel>(
        &self,
        _kernel: K,
        block: u32,
        dynamic_shared: u32,
    ) -> Result<u32> {
        let config = LaunchConfig::new(1, block).with_dynamic_shared(dynamic_shared);
        let mut per_multiprocessor = u32::MAX;
        for entry in self.entries_of(&Wanted::new::<K>())? {
            let blocks = entry.prepare(&self.context, K::NAME, &config)?.blocks()?;
            per_multiprocessor = per_multiprocessor.min(blocks);
        }
        Ok(per_multiprocessor.saturating_mul(self.context.limits().multiprocessors))
    }

    /// Launches a kernel. `args` are checked against its parameters by the compiler, and against
    /// the compiled kernel here.
    ///
    /// A kernel that takes a `DevComm` is launched cooperatively: all of its blocks run at once or
    /// it is refused. Of a kernel for GIN it launches the entry for the device communicator's back
    /// end.
    ///
    /// What it takes a reference to may be dropped right after the launch: dropping waits for this
    /// rank's streams.
    ///
    /// # Errors
    ///
    /// [`LaunchError::KernelNotFound`], [`LaunchError::Refused`] with the reason,
    /// [`WorldError::RankLost`](crate::WorldError::RankLost), the driver's. Errors of the kernel
    /// itself come from the stream.
    ///
    /// # Safety
    ///
    /// - The kernel's own contract holds for these arguments, and every address among them is valid
    ///   on this GPU until the kernel has ended; in a [capture](crate::Stream::capture), until the
    ///   graph is closed.
    /// - For a kernel that communicates: every rank launches it with the same grid and block and
    ///   the same device communicator and windows, no other kernel uses the same device
    ///   communicator at the same time, and no rank drops a window or device communicator before
    ///   all ranks' kernels have ended with it (a barrier at the end of the kernel ensures that).
    pub unsafe fn launch<K: Kernel, A: LaunchArgs<K::Args>>(
        &self,
        stream: &Stream,
        _kernel: K,
        config: LaunchConfig,
        args: A,
    ) -> Result<()> {
        let wanted = Wanted::new::<K>();
        let ready = self.prepare(stream, &wanted, &config, args.closed(), args.dev_comm())?;
        let abi = args.into_abi();
        <K::Args as KernelArgs>::with_pointers(&abi, |addresses| {
            // SAFETY: the addresses are the parameters' in order, each of its compiled size, which
            // `prepare` has checked; it has made the context current, which is the stream's; the
            // caller upholds the kernel's contract.
            unsafe { ready.entry.function.launch(stream.handle(), &ready.shape, addresses) }
        })?;
        if let Some(flag) = ready.flag {
            stream.launched(K::NAME, flag);
        }
        Ok(())
    }

    /// Checks a launch with this device communicator among the arguments, of which what `closed`
    /// names is gone.
    fn prepare(
        &self,
        stream: &Stream,
        wanted: &Wanted,
        config: &LaunchConfig,
        closed: Option<&'static str>,
        dev_comm: Option<&DevComm>,
    ) -> Result<Ready> {
        let name = wanted.name;
        let refuse = |refusal| Error::Launch(LaunchError::Refused { kernel: name, refusal });
        if !stream.context().is(&self.context) {
            return Err(Error::invalid(format!(
                "kernel `{name}` was loaded by another context than its stream was made by"
            )));
        }
        self.context.health().check()?;
        if let Some(what) = closed {
            return Err(refuse(LaunchRefusal::Closed { what }));
        }
        let flag = dev_comm.and_then(|dev_comm| self.context.flag_of(dev_comm));
        if let Some(refusal) = flag.as_ref().and_then(|flag| flag.refusal()) {
            return Err(refuse(refusal));
        }
        let entry = self.entry_for(wanted, dev_comm)?;
        let prepared = entry.prepare(&self.context, name, config)?;
        if wanted.takes_dev_comm {
            let (device, blocks) = (self.context.limits(), prepared.blocks()?);
            let (barriers, stamp) = (entry.lsa_barriers, entry.stamp);
            check_dev_comm(dev_comm)
                .and_then(|comm| check_communicating(config, comm, barriers, stamp, device, blocks))
                .map_err(refuse)?;
        }
        if let Some(params) = &entry.params {
            check_params(params, wanted.params).map_err(refuse)?;
        }
        let shape = Shape {
            grid: config.grid.to_array(),
            block: config.block.to_array(),
            dynamic_shared: config.dynamic_shared,
            cooperative: wanted.takes_dev_comm,
        };
        Ok(Ready { entry, shape, flag })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        self.entries.clear();
        if self.modules.is_empty() || !self.context.can_free("a kernel module") {
            return;
        }
        let _ = self.context.cuda().bind();
        for module in self.modules.drain(..) {
            // SAFETY: this rank's streams are idle and the entries, which hold the functions, are
            // gone.
            if let Err(error) = unsafe { module.unload() } {
                tracing::warn!("{error}");
            }
        }
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

/// The version of NCCL's device code in a module, which must be the one whose `DevComm` this crate
/// makes.
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

fn holds_nul(file: &str) -> Error {
    let name = "its PTX or path holds a NUL".to_owned();
    Error::Launch(LaunchError::ModuleRejected { file: file.to_owned(), name, log: String::new() })
}

fn refused(file: &str, ptx_isa: &str, failure: LoadFailure) -> Error {
    let file = file.to_owned();
    match failure {
        LoadFailure::Other(error) => error,
        LoadFailure::PtxTooNew => {
            let driver = driver_version(&Machine::Gpus)
                .unwrap_or_else(|_| "of an unknown version".to_owned());
            Error::Launch(LaunchError::PtxTooNew { file, ptx: ptx_isa.to_owned(), driver })
        }
        LoadFailure::Refused { error, log } => {
            Error::Launch(LaunchError::ModuleRejected { file, name: error, log })
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
