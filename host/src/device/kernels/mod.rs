//! Loading and launching compiled kernels.

mod by_name;
mod embedded;
mod entry;
mod lookup;
mod modules;
mod rank;
mod set;
mod sidecar;

use std::path::Path;
use std::sync::Arc;

use devcomm_types::{ArgInfo, Kernel, KernelArgs, LaunchArgs, LaunchConfig, LaunchTarget};

pub use self::by_name::RawArg;
use self::entry::Entry;
use self::lookup::{KernelDesc, Loaded};
pub(super) use self::modules::Modules;
pub use self::set::{KernelSet, ModuleSource, WITHOUT_PTX};
pub use self::sidecar::ParamInfo;
use self::sidecar::check_params;
use super::abort::AbortFlag;
use super::context::Context;
use super::holds::CreationTime;
use super::launch::{FunctionInfo, check_communicating, check_dev_comm, check_safe};
use super::recorder::Operation;
use super::stream::Stream;
#[cfg(doc)]
use crate::error::{DriverError, LaunchError};
use crate::error::{Error, LaunchRefusal, Result};
use crate::sys::cuda::module::LaunchShape;

/// Kernels that are launched through this handle, such as another build of a kernel, or a version
/// in another language.
///
/// A program's own kernels need no `Kernels`: [`Rank::load`](crate::Rank::load) makes them
/// available to every stream.
///
/// ```no_run
/// # use devcomm_host::{Context, Error, Kernels};
/// # use devcomm_types::{Kernel, Launch, Unsafe};
/// # fn f<K: Kernel<Args = (usize,)>>(context: &Context) -> Result<(), Error> {
/// let stream = context.stream()?;
/// // SAFETY: the file has the kernel `K` in another language.
/// let kernels = unsafe { Kernels::load_files(context, &["cpp/fill.cubin"])? };
/// let launch = Launch::<K, _, Unsafe, _, _>::new((7_usize,)).grid(2).block(64);
/// // SAFETY: the kernel takes a number.
/// unsafe { launch.launch(&kernels.on(&stream))? };
/// # Ok(())
/// # }
/// ```
pub struct Kernels {
    modules: [Arc<Modules>; 1],
    context: Context,
    created_at: CreationTime,
}

/// A stream as a launch target for the kernels of a [`Kernels`]: made by [`Kernels::on`].
#[derive(Clone, Copy, Debug)]
pub struct KernelsOn<'a> {
    kernels: &'a Kernels,
    stream: &'a Stream,
}

/// A launch that has passed its checks.
struct CheckedLaunch {
    entry: Arc<Entry>,
    shape: LaunchShape,
    /// The abort flag of its device communicator.
    flag: Option<Arc<AbortFlag>>,
    /// The number of the communicator of its arguments.
    communicator: Option<u64>,
}

impl Kernels {
    /// Loads a kernel set for this handle alone.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Context::load`].
    pub fn load(context: &Context, set: &KernelSet) -> Result<Self> {
        let modules = [Arc::new(Modules::load(context, set)?)];
        Ok(Self { modules, context: context.clone(), created_at: context.creation_time() })
    }

    /// Loads modules from files on the context's GPU: each a cubin, or anything else that the
    /// driver takes, with the description that the kernel build writes beside it (`sum.json` beside
    /// `sum.cubin`). A file's stem is matched with [`Kernel::FILE`].
    ///
    /// # Safety
    ///
    /// The files do not change meanwhile, their descriptions are true, and the code of each kernel
    /// keeps the promises of the [`Kernel`] of its file and name, if the program has one: a launch
    /// of such a kernel may be safe.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Context::load`]; [`LaunchError::BadSidecar`] when there is no
    /// description, [`Error::InvalidInput`] for a path that is not UTF-8;
    /// [`DriverError::NotSimulated`] on a simulated machine.
    pub unsafe fn load_files<P: AsRef<Path>>(context: &Context, files: &[P]) -> Result<Self> {
        if let Some(first) = files.first() {
            let what = || format!("the machine code of {}", first.as_ref().display());
            context.machine().refuse_simulated(what)?;
        }
        let modules = [Arc::new(Modules::load_files(context, files)?)];
        Ok(Self { modules, context: context.clone(), created_at: context.creation_time() })
    }

    /// Returns `stream` as the target of launches of these kernels.
    #[must_use]
    pub fn on<'a>(&'a self, stream: &'a Stream) -> KernelsOn<'a> {
        KernelsOn { kernels: self, stream }
    }

    /// Returns the names of the kernels, ordered by file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.modules[0].names()
    }

    /// Does the same as [`Context::kernel_info`].
    ///
    /// # Errors
    ///
    /// [`LaunchError::KernelNotFound`].
    pub fn info<K: Kernel>(&self) -> Result<FunctionInfo> {
        self.loaded().info(&KernelDesc::new::<K>())
    }

    /// Does the same as [`Context::resident_blocks`].
    ///
    /// # Errors
    ///
    /// The errors are those of [`Context::resident_blocks`].
    pub fn resident_blocks<K: Kernel>(&self, block: u32, dynamic_shared: u32) -> Result<u32> {
        self.loaded().resident_blocks(&KernelDesc::new::<K>(), block, dynamic_shared)
    }

    /// Does the same as [`Context::resident_clusters`].
    ///
    /// # Errors
    ///
    /// The errors are those of [`Context::resident_clusters`].
    pub fn resident_clusters<K: Kernel>(
        &self,
        cluster: u32,
        block: u32,
        dynamic_shared: u32,
    ) -> Result<u32> {
        self.loaded().resident_clusters(&KernelDesc::new::<K>(), cluster, block, dynamic_shared)
    }

    fn loaded(&self) -> Loaded<'_> {
        Loaded { context: &self.context, modules: &self.modules }
    }
}

impl Context {
    /// Loads a program's kernels on this GPU, until the context is dropped. Idempotent for each
    /// set.
    ///
    /// All kernels are loaded now, not lazily: a load while a kernel waits for another rank would
    /// block on that kernel. A module for another architecture only (`sm_90a`, on a GPU that is not
    /// Hopper) is skipped, and a launch of its kernels is [`LaunchError::WrongArch`].
    ///
    /// A module's cubin is loaded if the program has one for this GPU. Otherwise, with a warning
    /// when the driver has refused it, and with `DEVCOMM_JIT=1` the driver compiles the PTX.
    ///
    /// A simulated machine runs a kernel's body in Rust, compiled into the program, and reads no
    /// module.
    ///
    /// # Errors
    ///
    /// [`LaunchError::KernelsUnavailable`] when the program was built without kernels,
    /// [`LaunchError::BadSidecar`], [`LaunchError::WrongNcclStamp`], [`LaunchError::WrongArch`],
    /// [`LaunchError::PtxTooNew`], [`LaunchError::ModuleRejected`] with the log of the driver's
    /// compiler.
    pub fn load(&self, set: &KernelSet) -> Result<()> {
        let has_it = |loaded: &[Arc<Modules>]| loaded.iter().any(|modules| modules.is_of(set));
        if has_it(&self.kernels().read()) {
            return Ok(());
        }
        let modules = Arc::new(Modules::load(self, set)?);
        let mut loaded = self.kernels().write();
        if !has_it(&loaded) {
            *loaded = loaded.iter().cloned().chain([modules]).collect();
            return Ok(());
        }
        drop(loaded);
        self.cuda().bind()?;
        // SAFETY: another thread has loaded the set meanwhile, and nothing has used these modules;
        // the context is current.
        unsafe { modules.unload() };
        Ok(())
    }

    /// Returns what a loaded kernel uses, as the driver compiled it; for a GIN kernel, the maximum
    /// over its entries, one per back end.
    ///
    /// # Errors
    ///
    /// [`LaunchError::KernelNotFound`].
    pub fn kernel_info<K: Kernel>(&self) -> Result<FunctionInfo> {
        self.with_loaded(|loaded| loaded.info(&KernelDesc::new::<K>()))
    }

    /// Returns the largest grid whose blocks are all resident, which a kernel that takes a
    /// `DevComm` needs; for a GIN kernel, with any of its entries. `block` is in threads,
    /// `dynamic_shared` in bytes per block.
    ///
    /// # Errors
    ///
    /// [`LaunchError::KernelNotFound`], [`LaunchError::Refused`] when a block of this size cannot
    /// run at all, the driver's errors.
    pub fn resident_blocks<K: Kernel>(&self, block: u32, dynamic_shared: u32) -> Result<u32> {
        self.with_loaded(|loaded| {
            loaded.resident_blocks(&KernelDesc::new::<K>(), block, dynamic_shared)
        })
    }

    /// Returns the number of clusters of `cluster` blocks that are resident at the same time: a
    /// cluster runs within one part of the GPU, so that some multiprocessors may stay unused.
    /// `block` is in threads, `dynamic_shared` in bytes per block. CUDA:
    /// `cuOccupancyMaxActiveClusters`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`resident_blocks`](Self::resident_blocks); [`LaunchError::Refused`]
    /// also for a cluster that a launch would refuse.
    pub fn resident_clusters<K: Kernel>(
        &self,
        cluster: u32,
        block: u32,
        dynamic_shared: u32,
    ) -> Result<u32> {
        self.with_loaded(|loaded| {
            loaded.resident_clusters(&KernelDesc::new::<K>(), cluster, block, dynamic_shared)
        })
    }

    fn with_loaded<R>(&self, f: impl FnOnce(&Loaded<'_>) -> R) -> R {
        let modules = Arc::clone(&self.kernels().read());
        f(&Loaded { context: self, modules: &modules })
    }
}

impl LaunchTarget for Stream {
    type Error = Error;

    unsafe fn launch_kernel<K: Kernel, A: LaunchArgs<K::Args>>(
        &self,
        config: LaunchConfig,
        args: A,
        safe: bool,
    ) -> Result<()> {
        self.context().with_loaded(|loaded| {
            // SAFETY: the caller keeps the kernel's contract for these arguments.
            unsafe { loaded.launch::<K, A>(self, config, args, safe) }
        })
    }
}

impl LaunchTarget for KernelsOn<'_> {
    type Error = Error;

    unsafe fn launch_kernel<K: Kernel, A: LaunchArgs<K::Args>>(
        &self,
        config: LaunchConfig,
        args: A,
        safe: bool,
    ) -> Result<()> {
        // SAFETY: the caller keeps the kernel's contract for these arguments.
        unsafe { self.kernels.loaded().launch::<K, A>(self.stream, config, args, safe) }
    }
}

impl Loaded<'_> {
    /// Launches a kernel.
    ///
    /// # Safety
    ///
    /// The contract is that of [`Launch::launch`](devcomm_types::Launch::launch).
    unsafe fn launch<K: Kernel, A: LaunchArgs<K::Args>>(
        &self,
        stream: &Stream,
        config: LaunchConfig,
        args: A,
        safe: bool,
    ) -> Result<()> {
        let kernel = KernelDesc::new::<K>();
        let enqueue = stream.begin_enqueue("a kernel launch")?;
        let checked = self.prepare(stream, &kernel, &config, args.info(), safe)?;
        if safe && !K::IN_PLACE && have_overlap::<K, A>(&args) {
            return Err(kernel.refuse(LaunchRefusal::OverlappingWindows));
        }
        let abi = args.into_abi();
        K::check(config.grid, config.block, &abi)
            .map_err(|unmet| kernel.refuse(LaunchRefusal::Requirement { unmet }))?;
        let recorder = self.context.recorder();
        let _launch = recorder.begin(Operation::launch(K::NAME, &config));
        <K::Args as KernelArgs>::with_pointers(&abi, |addresses| {
            // SAFETY: the addresses are those of the parameters in order, of their compiled sizes;
            // `prepare` has checked the sizes and has made the stream's context current; the caller
            // upholds the kernel's contract.
            unsafe { checked.entry.function.launch(stream.handle(), &checked.shape, addresses) }
        })
        .inspect_err(|error| self.context.mark_reported(error))?;
        stream.register_launch(&enqueue, K::NAME, checked.communicator, checked.flag);
        Ok(())
    }

    /// Returns why a launch is refused whose argument `what` cannot be used.
    fn refusal_of_closed(&self, what: &'static str, communicator: Option<u64>) -> LaunchRefusal {
        let issuer = communicator.and_then(|number| self.context.issuer(number));
        match issuer.filter(|issuer| !issuer.is_live()) {
            Some(issuer) => LaunchRefusal::CommunicatorEnded { how: issuer.state() },
            None => LaunchRefusal::Closed { what },
        }
    }

    /// Checks a launch with these arguments, a `safe` one also by [`check_safe`], and makes the
    /// stream's context current.
    fn prepare(
        &self,
        stream: &Stream,
        kernel: &KernelDesc<'_>,
        config: &LaunchConfig,
        args: ArgInfo<'_>,
        safe: bool,
    ) -> Result<CheckedLaunch> {
        let refuse = |refusal| kernel.refuse(refusal);
        if !stream.context().is(self.context) {
            return Err(Error::invalid(format!(
                "kernel `{}` was loaded in another context than that of its stream",
                kernel.name
            )));
        }
        self.context.check_health()?;
        if let Some(what) = args.closed {
            // After a failure on the GPU nothing can be used: the failure is the better error.
            return Err(match stream.is_idle() {
                Err(failed @ Error::Driver(_)) => failed,
                _ => refuse(self.refusal_of_closed(what, args.communicator)),
            });
        }
        if safe {
            check_safe(args).map_err(refuse)?;
            if args.communicator.is_some_and(|number| self.context.issuer(number).is_none()) {
                return Err(refuse(LaunchRefusal::OtherContext));
            }
        }
        let flag = args.dev_comm.and_then(|dev_comm| self.context.flag_of(dev_comm));
        if let Some(refusal) = flag.as_ref().and_then(|flag| flag.refusal()) {
            return Err(refuse(refusal));
        }
        let entry = self.entry_for(kernel, args.dev_comm)?;
        let prepared = entry.prepare(self.context, kernel.name, config)?;
        if kernel.takes_dev_comm {
            let (device, blocks) = (self.context.limits(), prepared.blocks()?);
            let (barriers, stamp) = (entry.lsa_barriers, entry.stamp);
            check_dev_comm(args.dev_comm)
                .and_then(|comm| check_communicating(config, comm, barriers, stamp, device, blocks))
                .map_err(refuse)?;
        }
        if let Some(params) = &entry.params {
            check_params(params, kernel.params).map_err(refuse)?;
        }
        let shape = shape_of(config, kernel.takes_dev_comm && config.cooperative);
        Ok(CheckedLaunch { entry, shape, flag, communicator: args.communicator })
    }
}

/// Returns whether two windows among the arguments share memory of this rank.
fn have_overlap<K: Kernel, A: LaunchArgs<K::Args>>(args: &A) -> bool {
    let (mut windows, mut pairs) = (0, 0);
    args.windows(&mut |one| {
        // No window is empty: each makes a pair with itself.
        windows += 1;
        args.windows(&mut |other| {
            pairs += usize::from(one.start < other.end && other.start < one.end);
        });
    });
    pairs > windows
}

/// Returns the part of a configuration that the driver gets.
fn shape_of(config: &LaunchConfig, cooperative: bool) -> LaunchShape {
    let LaunchConfig { grid, block, dynamic_shared, cluster, dependent, .. } = *config;
    let (grid, block) = (grid.to_array(), block.to_array());
    LaunchShape { grid, block, dynamic_shared, cluster, cooperative, dependent }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.modules[0].is_empty() {
            return;
        }
        let (context, created_at) = (self.context.clone(), self.created_at);
        let moved = || {
            let modules = std::mem::take(&mut self.modules);
            Self { modules, context: context.clone(), created_at }
        };
        if !context.can_free_or_hold("a kernel module", created_at, moved) {
            return;
        }
        self.context.bind_to_free();
        // SAFETY: this rank's streams are idle, and nothing else refers to these modules.
        unsafe { self.modules[0].unload() };
    }
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
