//! Launches by name, of kernels that the program was compiled without: a language on top of this
//! crate loads them from files.

use std::collections::BTreeSet;
use std::ffi::c_void;

use devcomm_types::{ArgInfo, GinType, IntoArg, LaunchConfig};
use parking_lot::Mutex;

use super::lookup::KernelDesc;
use super::sidecar::ParamInfo;
use super::{Kernels, KernelsOn};
use crate::device::recorder::Operation;
use crate::error::{LaunchError, Result};

/// An argument of a launch by name.
pub struct RawArg<'a>(Box<dyn Argument + 'a>);

impl<'a> RawArg<'a> {
    /// Returns a host value for a parameter with this `KernelParam::Abi`, as a launch converts it.
    pub fn new<Abi: Copy + 'static, A: IntoArg<Abi> + Clone + 'a>(value: A) -> Self {
        Self(Box::new(Converted { abi: value.clone().into_arg(), value }))
    }

    /// Returns the bytes of a value, for a parameter of a type that only the kernel knows.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut words = vec![0_u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut::<_, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self(Box::new(Bytes { words, len: bytes.len() }))
    }
}

impl std::fmt::Debug for RawArg<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RawArg({} B)", self.0.size())
    }
}

/// A converted argument, of a type that the launch need not know.
trait Argument {
    fn info(&self) -> ArgInfo<'_>;
    /// Returns the size of the kernel's value in bytes.
    fn size(&self) -> usize;
    /// Returns where the kernel's value is.
    fn address(&self) -> *mut c_void;
}

struct Converted<A, Abi> {
    value: A,
    abi: Abi,
}

impl<Abi: Copy + 'static, A: IntoArg<Abi>> Argument for Converted<A, Abi> {
    fn info(&self) -> ArgInfo<'_> {
        self.value.info()
    }

    fn size(&self) -> usize {
        size_of::<Abi>()
    }

    fn address(&self) -> *mut c_void {
        (&raw const self.abi).cast_mut().cast()
    }
}

/// Bytes at a multiple of 8, which the driver copies.
struct Bytes {
    words: Vec<u64>,
    len: usize,
}

impl Argument for Bytes {
    fn info(&self) -> ArgInfo<'_> {
        ArgInfo::default()
    }

    fn size(&self) -> usize {
        self.len
    }

    fn address(&self) -> *mut c_void {
        self.words.as_ptr().cast_mut().cast()
    }
}

impl Kernels {
    /// Returns the parameters of the kernel of this name, in order; `None` if there is no such
    /// kernel. A kernel for GIN has the same in each of its entries.
    #[must_use]
    pub fn params(&self, name: &str) -> Option<Vec<ParamInfo>> {
        let entries = std::iter::once(name.to_owned()).chain(gin_entries(name));
        let entry = entries.into_iter().find_map(|name| self.modules[0].entry_named(&name))?;
        entry.params.clone()
    }
}

impl KernelsOn<'_> {
    /// Launches the kernel of this name. It is checked as any launch, also that each argument has
    /// the size of the compiled parameter; but not what the kernel requires of its arguments
    /// (`#[kernel(requires(..))]`), which is in the program's code.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Launch::launch`](devcomm_types::Launch::launch);
    /// [`DriverError::NotSimulated`](crate::DriverError::NotSimulated) on a simulated machine.
    ///
    /// # Safety
    ///
    /// The contract is that of [`Launch::launch`](devcomm_types::Launch::launch); each argument is
    /// of the parameter's type, and what the kernel requires holds.
    pub unsafe fn launch_by_name(
        &self,
        name: &str,
        config: LaunchConfig,
        args: &[RawArg<'_>],
    ) -> Result<()> {
        let (kernels, stream) = (self.kernels, self.stream);
        let machine = kernels.context.machine();
        machine.refuse_simulated(|| format!("the machine code of the kernel `{name}`"))?;
        let info = args.iter().fold(ArgInfo::default(), |info, arg| info.and(arg.0.info()));
        let sizes: Vec<usize> = args.iter().map(|arg| arg.0.size()).collect();
        let modules = &kernels.modules[0];
        let gin = gin_entries(name).any(|entry| modules.entry_named(&entry).is_some());
        if !gin && modules.entry_named(name).is_none() {
            let available = kernels.names().map(str::to_owned).collect();
            return Err(LaunchError::KernelNotFound { name: name.to_owned(), available }.into());
        }
        let name = interned(name);
        let kernel = KernelDesc::named(name, gin, &sizes, info.dev_comm.is_some());
        let enqueue = stream.begin_enqueue("a kernel launch")?;
        // What a safe launch checks in addition is part of this function's contract.
        let safe = false;
        let checked = kernels.loaded().prepare(stream, &kernel, &config, info, safe)?;
        let _launch = kernels.context.recorder().begin(Operation::launch(name, &config));
        let mut addresses: Vec<_> = args.iter().map(|arg| arg.0.address()).collect();
        // SAFETY: the addresses are those of values of the parameters' compiled sizes, in order,
        // which `prepare` has compared; it has made the context current. The rest is the caller's.
        unsafe { checked.entry.function.launch(stream.handle(), &checked.shape, &mut addresses) }
            .inspect_err(|error| kernels.context.mark_reported(error))?;
        stream.register_launch(&enqueue, name, checked.communicator, checked.flag);
        Ok(())
    }
}

/// Returns the names of the entries of a kernel for GIN.
fn gin_entries(name: &str) -> impl Iterator<Item = String> {
    let back_ends = GinType::BACK_ENDS.into_iter().filter_map(GinType::suffix);
    back_ends.map(move |suffix| format!("{name}_{suffix}"))
}

/// Returns the name with a static lifetime, which reports need.
fn interned(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock();
    if let Some(known) = names.get(name) {
        return known;
    }
    let name: &'static str = String::leak(name.to_owned());
    names.insert(name);
    name
}
