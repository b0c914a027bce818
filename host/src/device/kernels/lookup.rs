//! The entry of a kernel: loaded from a module or, on a simulated machine, its body in Rust.

use std::rc::Rc;

use devcomm_types::{DevComm, GinType, HostBody, Kernel, KernelArgs};

use super::{Entry, Kernels};
use crate::device::launch::{check_dev_comm, check_gin};
use crate::error::{DriverError, Error, LaunchError, LaunchRefusal, Result};

/// A kernel without its type, so that what is done with it is compiled once.
pub(super) struct Wanted {
    pub(super) name: &'static str,
    file: &'static str,
    gin: bool,
    body: Option<HostBody>,
    /// The size of each parameter in bytes.
    pub(super) params: &'static [usize],
    pub(super) takes_dev_comm: bool,
}

impl Wanted {
    pub(super) fn new<K: Kernel>() -> Self {
        Self {
            name: K::NAME,
            file: K::FILE,
            gin: K::GIN,
            body: K::BODY,
            params: <K::Args as KernelArgs>::SIZES,
            takes_dev_comm: <K::Args as KernelArgs>::TAKES_DEV_COMM,
        }
    }
}

impl Kernels {
    /// The entry that a launch with this device communicator takes.
    pub(super) fn entry_for(&self, kernel: &Wanted, comm: Option<&DevComm>) -> Result<Rc<Entry>> {
        let refuse = |refusal| Error::Launch(LaunchError::Refused { kernel: kernel.name, refusal });
        let back_end = || check_dev_comm(comm).and_then(check_gin).map_err(refuse);
        let back_end = kernel.gin.then(back_end).transpose()?;
        if self.context.machine().is_simulated() {
            return self.bound(kernel);
        }
        let Some(back_end) = back_end else {
            return self.entry(kernel, kernel.name).ok_or_else(|| self.not_found(kernel));
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

    /// All entries, at least one.
    pub(super) fn entries_of(&self, kernel: &Wanted) -> Result<Vec<Rc<Entry>>> {
        if self.context.machine().is_simulated() {
            return Ok(vec![self.bound(kernel)?]);
        }
        let entries: Vec<_> = if kernel.gin {
            GinType::BACK_ENDS.into_iter().filter_map(|b| self.gin_entry(kernel, b)).collect()
        } else {
            self.entry(kernel, kernel.name).into_iter().collect()
        };
        if entries.is_empty() { Err(self.not_found(kernel)) } else { Ok(entries) }
    }

    /// The entry of a simulated machine, of all back ends.
    fn bound(&self, kernel: &Wanted) -> Result<Rc<Entry>> {
        let key = (kernel.file, kernel.name);
        if let Some(entry) = self.bound.borrow().get(&key) {
            return Ok(Rc::clone(entry));
        }
        let body = kernel.body.ok_or_else(|| {
            Error::Driver(DriverError::NotSimulated {
                what: format!("the kernel `{}`, which has no body in Rust,", kernel.name),
            })
        })?;
        let function = self.context.cuda().bind_body(self.context.machine(), &body)?;
        let entry = Rc::new(Entry::new(function)?);
        self.bound.borrow_mut().insert(key, Rc::clone(&entry));
        Ok(entry)
    }

    fn gin_entry(&self, kernel: &Wanted, back_end: GinType) -> Option<Rc<Entry>> {
        self.entry(kernel, &format!("{}_{}", kernel.name, back_end.suffix()?))
    }

    fn entry(&self, kernel: &Wanted, name: &str) -> Option<Rc<Entry>> {
        self.entries.get(kernel.file)?.get(name).cloned()
    }

    pub(super) fn not_found(&self, kernel: &Wanted) -> Error {
        if let Some(arch) = self.left_out.get(kernel.file) {
            let (file, arch) = (kernel.file.to_owned(), arch.clone());
            let device = self.context.limits().compute_capability;
            return Error::Launch(LaunchError::WrongArch { file, arch, device });
        }
        let available = self.names().map(str::to_owned).collect();
        Error::Launch(LaunchError::KernelNotFound { name: kernel.name.to_owned(), available })
    }
}
