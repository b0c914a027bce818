//! LLVM modules: linking, optimising and emitting.

use std::ffi::CStr;
use std::path::Path;
use std::ptr::null_mut;

use super::functions::{Functions, Ref};
use super::value::{self, Function, Global, Linkage};
use super::{Context, Result, TargetMachine, c_path, c_string, failure};

/// An owned module.
pub(crate) struct Module<'c> {
    context: &'c Context<'c>,
    raw: Ref,
}

impl Drop for Module<'_> {
    fn drop(&mut self) {
        // SAFETY: the module is owned (`link_in` forgets one that LLVM took over), and its values
        // borrow it.
        unsafe { (self.f().LLVMDisposeModule)(self.raw) }
    }
}

impl<'c> Module<'c> {
    /// Takes ownership of a live module of that context.
    pub(super) fn new(context: &'c Context<'c>, raw: Ref) -> Self {
        Self { context, raw }
    }

    pub(super) fn raw(&self) -> Ref {
        self.raw
    }

    fn f(&self) -> &'c Functions {
        &self.context.llvm.f
    }

    pub(crate) fn context(&self) -> &'c Context<'c> {
        self.context
    }

    pub(crate) fn data_layout(&self) -> String {
        // SAFETY: LLVM returns a NUL-terminated string that the module owns.
        unsafe {
            CStr::from_ptr((self.f().LLVMGetDataLayoutStr)(self.raw)).to_string_lossy().into_owned()
        }
    }

    pub(crate) fn set_data_layout(&self, layout: &str) -> Result<()> {
        let layout = c_string(layout)?;
        // SAFETY: the string is NUL-terminated and copied.
        unsafe { (self.f().LLVMSetDataLayout)(self.raw, layout.as_ptr()) }
        Ok(())
    }

    /// Sets the module's name, which otherwise contains a build's hash.
    pub(crate) fn set_name(&self, name: &str) {
        // SAFETY: pointer and length belong together, and LLVM copies the text.
        unsafe {
            (self.f().LLVMSetModuleIdentifier)(self.raw, name.as_ptr().cast(), name.len());
            (self.f().LLVMSetSourceFileName)(self.raw, name.as_ptr().cast(), name.len());
        }
    }

    pub(crate) fn functions(&self) -> Vec<Function<'_>> {
        let f = self.f();
        // SAFETY: the two functions iterate over a module's functions.
        let all =
            unsafe { value::list(f, (f.LLVMGetFirstFunction)(self.raw), f.LLVMGetNextFunction) };
        all.map(Function::new).collect()
    }

    /// Returns the global variables.
    pub(crate) fn globals(&self) -> Vec<Global<'_>> {
        let f = self.f();
        // SAFETY: the two functions iterate over a module's variables.
        let all = unsafe { value::list(f, (f.LLVMGetFirstGlobal)(self.raw), f.LLVMGetNextGlobal) };
        all.map(Global::new).collect()
    }

    pub(crate) fn aliases(&self) -> Vec<Global<'_>> {
        let (f, first) = (self.f(), self.f().LLVMGetFirstGlobalAlias);
        // SAFETY: the two functions iterate over a module's aliases.
        let all = unsafe { value::list(f, first(self.raw), f.LLVMGetNextGlobalAlias) };
        all.map(Global::new).collect()
    }

    /// Links `other` into this module.
    pub(crate) fn link_in(&mut self, other: Module<'c>) -> Result<()> {
        if !std::ptr::eq(self.context, other.context) {
            return failure("two modules of different contexts cannot be linked");
        }
        let other = std::mem::ManuallyDrop::new(other);
        // SAFETY: both modules are live and of one context; LLVM takes ownership of `other` in any
        // case.
        let bad = unsafe { (self.f().LLVMLinkModules2)(self.raw, other.raw) != 0 };
        if bad {
            Err(self.context.errors_or("LLVM cannot link the modules".to_owned()))
        } else {
            Ok(())
        }
    }

    /// Checks that the module is well formed.
    pub(crate) fn verify(&self) -> Result<()> {
        const RETURN_STATUS: i32 = 2;
        let mut message = null_mut();
        // SAFETY: the module is live; LLVM always sets the message.
        let (bad, message) = unsafe {
            let bad = (self.f().LLVMVerifyModule)(self.raw, RETURN_STATUS, &mut message) != 0;
            (bad, self.context.llvm.message(message))
        };
        if bad { failure(format!("the linked module is not valid: {message}")) } else { Ok(()) }
    }

    /// Runs passes, in the syntax of `opt -passes=`.
    pub(crate) fn optimise(&mut self, machine: &TargetMachine<'_>, passes: &str) -> Result<()> {
        let (f, passes) = (self.f(), c_string(passes)?);
        // SAFETY: all handles are live; converting an error to its message frees it.
        unsafe {
            let options = (f.LLVMCreatePassBuilderOptions)();
            let error = (f.LLVMRunPasses)(self.raw, passes.as_ptr(), machine.raw(), options);
            (f.LLVMDisposePassBuilderOptions)(options);
            if !error.is_null() {
                let raw = (f.LLVMGetErrorMessage)(error);
                let text = CStr::from_ptr(raw).to_string_lossy().into_owned();
                (f.LLVMDisposeErrorMessage)(raw);
                return failure(text);
            }
        }
        self.context.check_diagnostics()
    }

    /// Generates PTX.
    pub(crate) fn emit(&mut self, machine: &TargetMachine<'_>) -> Result<String> {
        const ASSEMBLY: i32 = 0;
        let (f, mut message, mut buffer) = (self.f(), null_mut(), null_mut());
        // SAFETY: the handles are live; the buffer is copied and then freed.
        let text = unsafe {
            let bad = (f.LLVMTargetMachineEmitToMemoryBuffer)(
                machine.raw(),
                self.raw,
                ASSEMBLY,
                &mut message,
                &mut buffer,
            );
            if bad != 0 {
                return Err(self.context.errors_or(self.context.llvm.message(message)));
            }
            let start = (f.LLVMGetBufferStart)(buffer).cast::<u8>();
            let text = std::slice::from_raw_parts(start, (f.LLVMGetBufferSize)(buffer)).to_vec();
            (f.LLVMDisposeMemoryBuffer)(buffer);
            text
        };
        self.context.check_diagnostics()?;
        String::from_utf8(text).or_else(|_| failure("LLVM's PTX is not text"))
    }

    pub(crate) fn write_bitcode(&self, path: &Path) -> Result<()> {
        let name = c_path(path)?;
        // SAFETY: the module is live and the name NUL-terminated.
        let bad = unsafe { (self.f().LLVMWriteBitcodeToFile)(self.raw, name.as_ptr()) != 0 };
        if bad { failure(format!("cannot write {}", path.display())) } else { Ok(()) }
    }

    /// Writes the module as text.
    pub(crate) fn print(&self, path: &Path) -> Result<()> {
        let (name, mut message) = (c_path(path)?, null_mut());
        // SAFETY: the module is live and the name NUL-terminated; the message is freed once.
        let bad =
            unsafe { (self.f().LLVMPrintModuleToFile)(self.raw, name.as_ptr(), &mut message) != 0 };
        if bad {
            let reason = self.context.llvm.message(message);
            return failure(format!("cannot write {}: {reason}", path.display()));
        }
        Ok(())
    }

    /// Moves a variable to shared memory: creates one of the same name there, and replaces every
    /// use of the old one by a cast of the new address. A declaration without a definition becomes
    /// the unsized array of dynamic shared memory.
    pub(crate) fn move_to_shared(&self, old: Global<'_>) -> Result<()> {
        const SHARED: u32 = 3;
        const WIDEST_ACCESS: u32 = 16;
        let (f, name) = (self.f(), old.name());
        // SAFETY: a global is in a module.
        let own = unsafe { (f.LLVMGetGlobalParent)(old.raw()) == self.raw };
        if !own || old.as_variable().is_none() {
            return failure(format!("`{name}` is not a variable of this module"));
        }
        old.set_name(&format!("{name}.generic"));
        let name = c_string(&name)?;
        // SAFETY: `old` is a variable of this module, as checked, so it has a value type and an
        // alignment; the cast has the type of `old`, so that its uses agree.
        unsafe {
            let bytes = (f.LLVMArrayType2)((f.LLVMInt8TypeInContext)(self.context.raw), 0);
            let dynamic = old.is_declaration();
            let ty = if dynamic { bytes } else { (f.LLVMGlobalGetValueType)(old.raw()) };
            let new = (f.LLVMAddGlobalInAddressSpace)(self.raw, ty, name.as_ptr(), SHARED);
            let align = (f.LLVMGetAlignment)(old.raw());
            (f.LLVMSetAlignment)(new, if dynamic { align.max(WIDEST_ACCESS) } else { align });
            if !dynamic {
                (f.LLVMSetInitializer)(new, (f.LLVMGetUndef)(ty));
                (f.LLVMSetLinkage)(new, Linkage::INTERNAL.0);
                old.retire();
            }
            let cast = (f.LLVMConstAddrSpaceCast)(new, (f.LLVMTypeOf)(old.raw()));
            (f.LLVMReplaceAllUsesWith)(old.raw(), cast);
        }
        Ok(())
    }
}
