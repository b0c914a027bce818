//! Safe types over the LLVM-C interface of the toolchain's LLVM.
//!
//! # Safety model
//!
//! This module has all of the crate's unsafe code. It is sound because:
//!
//! * a [`Context`] outlives its [`Module`]s, and a module the [`Value`]s in it (lifetimes);
//! * linking and passes, which delete values, take the module by `&mut` or by value, so that no
//!   `Value` outlives them. Under a shared borrow an unwanted global is only
//!   [retired](value::Global::retire), for a later pass to remove. Two methods of an instruction
//!   delete it, [`remove`](Instruction::remove) and [`split_copy`](Instruction::split_copy); their
//!   callers keep no other copy of its handle;
//! * a method that LLVM defines for one kind of value only is a method of that kind's type;
//! * handles are raw pointers, so no type is `Send`.

mod functions;
mod module;
mod place;
mod target_machine;
mod types;
mod value;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::ptr::null_mut;

use functions::{Functions, Ref};
pub(crate) use module::Module;
pub(crate) use place::is_of_rust;
pub(crate) use target_machine::TargetMachine;
pub(crate) use value::{Function, Instruction, Linkage, Opcode, Value};

const TRIPLE: &CStr = c"nvptx64-nvidia-cuda";

/// An error of LLVM or of this code, with its complete message.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

fn failure<T>(message: impl Into<String>) -> Result<T> {
    Err(Failure(message.into()))
}

/// A loaded libLLVM with an initialised NVPTX back end.
pub(crate) struct Llvm {
    f: Functions,
}

/// An option for every job: loops over register arrays must be unrolled, or the arrays are in local
/// memory. The default threshold (300 instructions) is too low for the sum of eight 16-byte vectors
/// of f16 in f32.
const UNROLL: &str = "-unroll-threshold=2000";

impl Llvm {
    /// Loads the library for the life of the process, and checks that it is the LLVM `version` that
    /// rustc has: an older LLVM may not read the bitcode. The `options` are LLVM's, for the
    /// process.
    pub(crate) fn load(library: &Path, version: &str, options: &[&str]) -> Result<Self> {
        let f = Functions::load(library)
            .map_err(|e| Failure(format!("cannot use {}: {e}", library.display())))?;
        let [mut major, mut minor, mut patch] = [0; 3];
        // LLVM expects the program's name first.
        let all = ["cuda_builder", UNROLL].into_iter().chain(options.iter().copied());
        let all = all.map(c_string).collect::<Result<Vec<_>>>()?;
        let options: Vec<_> = all.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the three pointers are to live integers and the options to live strings, which
        // LLVM copies; the initialisers have no arguments and may be called repeatedly.
        unsafe {
            (f.LLVMGetVersion)(&mut major, &mut minor, &mut patch);
            (f.LLVMInitializeNVPTXTargetInfo)();
            (f.LLVMInitializeNVPTXTarget)();
            (f.LLVMInitializeNVPTXTargetMC)();
            (f.LLVMInitializeNVPTXAsmPrinter)();
            let count = options.len() as c_int;
            (f.LLVMParseCommandLineOptions)(count, options.as_ptr(), std::ptr::null());
        }
        let has = format!("{major}.{minor}.{patch}");
        // A distribution may have updated LLVM by a patch release after building rustc.
        if has.split('.').take(2).ne(version.split('.').take(2)) {
            let library = library.display();
            return failure(format!("{library} is LLVM {has}, but rustc has LLVM {version}"));
        }
        Ok(Self { f })
    }

    /// Converts and frees a message that LLVM allocated.
    fn message(&self, raw: *mut c_char) -> String {
        if raw.is_null() {
            return "LLVM gave no reason".to_owned();
        }
        // SAFETY: callers pass a NUL-terminated string that they own; it is freed once.
        unsafe {
            let text = CStr::from_ptr(raw).to_string_lossy().into_owned();
            (self.f.LLVMDisposeMessage)(raw);
            text
        }
    }
}

/// Diagnostics of one context.
struct Diagnostics<'l> {
    llvm: &'l Llvm,
    errors: RefCell<Vec<String>>,
}

extern "C" fn on_diagnostic(info: Ref, diagnostics: *mut c_void) {
    /// `LLVMDSError`.
    const ERROR: c_int = 0;
    // SAFETY: `Context::new` registered this function with its boxed `Diagnostics`, which outlives
    // the context; LLVM calls it on the context's own thread with a live diagnostic.
    unsafe {
        let diagnostics = &*diagnostics.cast::<Diagnostics<'_>>();
        let f = &diagnostics.llvm.f;
        let error = (f.LLVMGetDiagInfoSeverity)(info) == ERROR;
        let text = diagnostics.llvm.message((f.LLVMGetDiagInfoDescription)(info));
        if error {
            diagnostics.errors.borrow_mut().push(text);
        }
    }
}

/// An LLVM context, which owns types and state shared by modules.
pub(crate) struct Context<'l> {
    llvm: &'l Llvm,
    raw: Ref,
    diagnostics: Box<Diagnostics<'l>>,
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: the context is owned, and its modules borrow it, so none is left.
        unsafe { (self.llvm.f.LLVMContextDispose)(self.raw) }
    }
}

impl<'l> Context<'l> {
    pub(crate) fn new(llvm: &'l Llvm) -> Self {
        let diagnostics = Box::new(Diagnostics { llvm, errors: RefCell::default() });
        // SAFETY: the handler's data is boxed, so it stays in place as long as the context; the
        // handler only reads it.
        let raw = unsafe {
            let raw = (llvm.f.LLVMContextCreate)();
            let data = (&raw const *diagnostics).cast_mut().cast();
            (llvm.f.LLVMContextSetDiagnosticHandler)(raw, on_diagnostic, data);
            raw
        };
        Self { llvm, raw, diagnostics }
    }

    /// Returns the errors reported since the last call, else `reason`.
    fn errors_or(&self, reason: String) -> Failure {
        let errors = std::mem::take(&mut *self.diagnostics.errors.borrow_mut());
        Failure(if errors.is_empty() { reason } else { errors.join("\n") })
    }

    /// Fails with the errors reported since the last call, if any.
    fn check_diagnostics(&self) -> Result<()> {
        let quiet = self.diagnostics.errors.borrow().is_empty();
        if quiet { Ok(()) } else { Err(self.errors_or(String::new())) }
    }

    /// Returns an empty module for the GPU, with the data layout of `like`.
    pub(crate) fn new_module(&self, name: &str, like: &Module<'_>) -> Result<Module<'_>> {
        let name = c_string(name)?;
        let f = &self.llvm.f;
        // SAFETY: the strings are NUL-terminated, and LLVM copies them.
        let raw = unsafe {
            let raw = (f.LLVMModuleCreateWithNameInContext)(name.as_ptr(), self.raw);
            (f.LLVMSetDataLayout)(raw, (f.LLVMGetDataLayoutStr)(like.raw()));
            (f.LLVMSetTarget)(raw, TRIPLE.as_ptr());
            raw
        };
        Ok(Module::new(self, raw))
    }

    /// Reads a module's symbols; function bodies are read when linked.
    pub(crate) fn read_lazily(&self, path: &Path) -> Result<Module<'_>> {
        let buffer = self.buffer(path)?;
        let mut raw = null_mut();
        // SAFETY: the buffer is live, and LLVM takes ownership in any case.
        let bad = unsafe {
            (self.llvm.f.LLVMGetBitcodeModuleInContext2)(self.raw, buffer, &mut raw) != 0
        };
        self.opened(path, raw, bad)
    }

    /// Reads a whole module.
    pub(crate) fn read(&self, path: &Path) -> Result<Module<'_>> {
        let buffer = self.buffer(path)?;
        let mut raw = null_mut();
        // SAFETY: the buffer is live during the call, and freed once after it.
        let bad = unsafe {
            let bad = (self.llvm.f.LLVMParseBitcodeInContext2)(self.raw, buffer, &mut raw) != 0;
            (self.llvm.f.LLVMDisposeMemoryBuffer)(buffer);
            bad
        };
        self.opened(path, raw, bad)
    }

    fn opened(&self, path: &Path, raw: Ref, bad: bool) -> Result<Module<'_>> {
        if bad {
            let reason = self.errors_or("it is not LLVM bitcode".to_owned());
            return failure(format!("cannot read {}: {reason}", path.display()));
        }
        Ok(Module::new(self, raw))
    }

    fn buffer(&self, path: &Path) -> Result<Ref> {
        let name = c_path(path)?;
        let (mut buffer, mut message) = (null_mut(), null_mut());
        // SAFETY: the name is NUL-terminated and the two results are live variables.
        let bad = unsafe {
            (self.llvm.f.LLVMCreateMemoryBufferWithContentsOfFile)(
                name.as_ptr(),
                &mut buffer,
                &mut message,
            ) != 0
        };
        if bad {
            let reason = self.llvm.message(message);
            return failure(format!("cannot read {}: {reason}", path.display()));
        }
        Ok(buffer)
    }

    /// Returns the attribute of this name, without a value: with the value 0, which for `captures`
    /// means none.
    pub(crate) fn attribute(&self, name: &str) -> Result<Attribute<'_>> {
        let kind = self.attribute_kind(name)?;
        // SAFETY: the kind is LLVM's.
        Ok(self.own(unsafe { (self.llvm.f.LLVMCreateEnumAttribute)(self.raw, kind, 0) }))
    }

    /// Returns the `byval` attribute for a parameter of this size.
    pub(crate) fn by_value(&self, bytes: u64) -> Result<Attribute<'_>> {
        let (f, kind) = (&self.llvm.f, self.attribute_kind("byval")?);
        // SAFETY: the kind is LLVM's, and the type one of this context.
        Ok(self.own(unsafe {
            let array = (f.LLVMArrayType2)((f.LLVMInt8TypeInContext)(self.raw), bytes);
            (f.LLVMCreateTypeAttribute)(self.raw, kind, array)
        }))
    }

    /// Returns a target-dependent attribute.
    pub(crate) fn target_attribute(&self, name: &str, value: &str) -> Attribute<'_> {
        // SAFETY: each string is passed with its length.
        self.own(unsafe {
            (self.llvm.f.LLVMCreateStringAttribute)(
                self.raw,
                name.as_ptr().cast(),
                name.len() as u32,
                value.as_ptr().cast(),
                value.len() as u32,
            )
        })
    }

    fn attribute_kind(&self, name: &str) -> Result<u32> {
        let kind_of = self.llvm.f.LLVMGetEnumAttributeKindForName;
        // SAFETY: name and length belong together.
        match unsafe { kind_of(name.as_ptr().cast(), name.len()) } {
            0 => failure(format!("this LLVM does not know `{name}`")),
            kind => Ok(kind),
        }
    }

    /// Returns an attribute of this context.
    fn own(&self, raw: Ref) -> Attribute<'_> {
        Attribute { raw, context: self.raw, lifetime: PhantomData }
    }
}

/// An attribute of a function, a parameter or an argument.
#[derive(Clone, Copy)]
pub(crate) struct Attribute<'c> {
    raw: Ref,
    context: Ref,
    lifetime: PhantomData<&'c ()>,
}

/// The part of a function that an attribute applies to.
#[derive(Clone, Copy)]
pub(crate) enum AttributePlace {
    Function,
    /// An argument or parameter, counted from 0.
    Argument(u32),
}

impl AttributePlace {
    /// Returns LLVM's index. The result of a function has index 0.
    fn index(self) -> u32 {
        match self {
            Self::Function => u32::MAX,
            Self::Argument(index) => index + 1,
        }
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).or_else(|_| failure(format!("{text:?} has a zero byte in it")))
}

fn c_path(path: &Path) -> Result<CString> {
    let text = path.to_str().ok_or_else(|| Failure(format!("{path:?} is not UTF-8")))?;
    c_string(text)
}

#[cfg(test)]
mod tests {
    use super::{Context, Llvm, Module, UNROLL};
    use crate::link::BACK_ENDS;
    use crate::toolchain::Toolchain;

    /// LLVM ignores options that it does not know.
    #[test]
    fn llvm_has_every_option() {
        let toolchain = Toolchain::find(None, None).unwrap();
        let library = std::fs::read(&toolchain.libllvm).unwrap();
        for option in BACK_ENDS.concat().into_iter().chain([UNROLL]) {
            let name = option.trim_start_matches('-').split('=').next().unwrap().as_bytes();
            let found = library.windows(name.len()).any(|window| window == name);
            assert!(found, "LLVM {} has no option {option}", toolchain.llvm_version);
        }
    }

    #[test]
    fn an_array_of_bytes_without_a_value_has_no_bytes() {
        let toolchain = Toolchain::find(None, None).unwrap();
        let llvm = Llvm::load(&toolchain.libllvm, &toolchain.llvm_version, &[]).unwrap();
        let (context, f) = (Context::new(&llvm), &llvm.f);
        // SAFETY: the texts are NUL-terminated, and the handles are of one context, which this
        // test has made.
        let raw = unsafe {
            let raw = (f.LLVMModuleCreateWithNameInContext)(c"test".as_ptr(), context.raw);
            let ty = (f.LLVMArrayType2)((f.LLVMInt8TypeInContext)(context.raw), 4);
            let variable = (f.LLVMAddGlobalInAddressSpace)(raw, ty, c"bytes".as_ptr(), 0);
            (f.LLVMSetInitializer)(variable, (f.LLVMGetUndef)(ty));
            raw
        };
        let module = Module::new(&context, raw);
        let values = module.globals().into_iter().map(|global| global.initializer().unwrap());
        assert_eq!(values.map(|value| value.as_bytes()).collect::<Vec<_>>(), [None]);
    }
}
