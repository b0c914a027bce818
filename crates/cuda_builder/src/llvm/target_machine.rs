//! LLVM's code generator for NVPTX.

use std::ptr::null_mut;

use super::functions::Ref;
use super::{Llvm, Result, TRIPLE, c_string, failure};

/// LLVM's code generator for one architecture.
pub(crate) struct TargetMachine<'l> {
    llvm: &'l Llvm,
    raw: Ref,
}

impl Drop for TargetMachine<'_> {
    fn drop(&mut self) {
        // SAFETY: the machine is owned, and nothing borrows from it across calls.
        unsafe { (self.llvm.f.LLVMDisposeTargetMachine)(self.raw) }
    }
}

impl<'l> TargetMachine<'l> {
    pub(super) fn raw(&self) -> Ref {
        self.raw
    }

    /// Returns the code generator for a `cpu` such as `sm_90`, and `features` such as `+ptx86`.
    pub(crate) fn new(llvm: &'l Llvm, cpu: &str, features: &str) -> Result<Self> {
        let (cpu, features) = (c_string(cpu)?, c_string(features)?);
        let (mut target, mut message) = (null_mut(), null_mut());
        const AGGRESSIVE: i32 = 3;
        /// The default relocation model, and the default code model.
        const DEFAULT: i32 = 0;
        // SAFETY: all strings are NUL-terminated and copied; the target lives as long as LLVM.
        unsafe {
            if (llvm.f.LLVMGetTargetFromTriple)(TRIPLE.as_ptr(), &mut target, &mut message) != 0 {
                return failure(llvm.message(message));
            }
            let raw = (llvm.f.LLVMCreateTargetMachine)(
                target,
                TRIPLE.as_ptr(),
                cpu.as_ptr(),
                features.as_ptr(),
                AGGRESSIVE,
                DEFAULT,
                DEFAULT,
            );
            if raw.is_null() {
                return failure(format!("LLVM has no machine for {cpu:?} with {features:?}"));
            }
            Ok(Self { llvm, raw })
        }
    }
}
