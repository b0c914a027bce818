//! The entry of a kernel: loaded from a module or, on a simulated machine, its body in Rust.

use std::rc::Rc;

use devcomm_types::{DevComm, GinType, HostBody, Kernel, KernelArgs, LaunchConfig};

use super::{Entry, Modules};
use crate::device::context::Context;
use crate::device::launch::{FunctionInfo, check_dev_comm, check_gin};
use crate::error::{DriverError, Error, LaunchError, LaunchRefusal, Result};

/// A kernel without its type, so that what is done with it is compiled once.
pub(super) struct Wanted {
    pub(super) name: &'static str,
    package: &'static str,
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
            package: K::PACKAGE,
            file: K::FILE,
            gin: K::GIN,
            body: K::BODY,
            params: <K::Args as KernelArgs>::SIZES,
            takes_dev_comm: <K::Args as KernelArgs>::TAKES_DEV_COMM,
        }
    }

    /// Why a launch of it is not made.
    pub(super) fn refuse(&self, refusal: LaunchRefusal) -> Error {
        LaunchError::Refused { kernel: self.name, refusal }.into()
    }
}

/// The modules that a launch looks its kernel up in.
pub(super) struct Loaded<'a> {
    pub(super) context: &'a Context,
    pub(super) modules: &'a [Rc<Modules>],
}

impl Loaded<'_> {
    /// What the driver made of a kernel, of all of its entries.
    pub(super) fn info(&self, kernel: &Wanted) -> Result<FunctionInfo> {
        let infos = self.entries_of(kernel)?.into_iter().map(|entry| entry.info);
        infos.reduce(FunctionInfo::most).ok_or_else(|| self.not_found(kernel))
    }

    /// The largest grid that runs all at once with any of its entries.
    pub(super) fn resident_blocks(
        &self,
        kernel: &Wanted,
        block: u32,
        dynamic_shared: u32,
    ) -> Result<u32> {
        let config = LaunchConfig::new(1, block).with_dynamic_shared(dynamic_shared);
        let mut per_multiprocessor = u32::MAX;
        for entry in self.entries_of(kernel)? {
            let blocks = entry.prepare(self.context, kernel.name, &config)?.blocks()?;
            per_multiprocessor = per_multiprocessor.min(blocks);
        }
        Ok(per_multiprocessor.saturating_mul(self.context.limits().multiprocessors))
    }

    /// The entry that a launch with this device communicator takes.
    pub(super) fn entry_for(&self, kernel: &Wanted, comm: Option<&DevComm>) -> Result<Rc<Entry>> {
        let refuse = |refusal| kernel.refuse(refusal);
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
    fn entries_of(&self, kernel: &Wanted) -> Result<Vec<Rc<Entry>>> {
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

    /// The entry of a simulated machine, of all back ends. What is loaded is not known there, but
    /// that something has to be.
    fn bound(&self, kernel: &Wanted) -> Result<Rc<Entry>> {
        let modules = self.modules.first().ok_or_else(|| self.not_found(kernel))?;
        let key = [kernel.package, kernel.file, kernel.name];
        if let Some(entry) = modules.bound.borrow().get(&key) {
            return Ok(Rc::clone(entry));
        }
        let body = kernel.body.ok_or_else(|| DriverError::NotSimulated {
            what: format!("the kernel `{}`, which has no body in Rust,", kernel.name),
        })?;
        let function = self.context.cuda().bind_body(self.context.machine(), &body)?;
        let entry = Rc::new(Entry::new(function)?);
        modules.bound.borrow_mut().insert(key, Rc::clone(&entry));
        Ok(entry)
    }

    fn gin_entry(&self, kernel: &Wanted, back_end: GinType) -> Option<Rc<Entry>> {
        self.entry(kernel, &format!("{}_{}", kernel.name, back_end.suffix()?))
    }

    fn entry(&self, kernel: &Wanted, name: &str) -> Option<Rc<Entry>> {
        self.modules.iter().find_map(|modules| modules.entry(kernel.package, kernel.file, name))
    }

    fn not_found(&self, kernel: &Wanted) -> Error {
        if let Some(arch) = self.modules.iter().find_map(|m| m.left_out.get(kernel.file)) {
            let (file, arch) = (kernel.file.to_owned(), arch.clone());
            let device = self.context.limits().compute_capability;
            return LaunchError::WrongArch { file, arch, device }.into();
        }
        let names = self.modules.iter().flat_map(|modules| modules.names());
        let available = names.map(str::to_owned).collect();
        LaunchError::KernelNotFound { name: kernel.name.to_owned(), available }.into()
    }
}
