//! Where in the sources an instruction is from, and the types that GPUs lack.

use std::ffi::{c_char, c_uint};

use super::functions::{Functions, Ref};
use super::value::{Function, Instruction, Opcode, Value, bytes};

/// LLVM's numbers of types.
const FP128: i32 = 5;
const INTEGER: i32 = 8;

/// Returns whether a source file is of Rust's standard library.
pub(crate) fn is_of_rust(file: &str) -> bool {
    file.contains("/rustlib/src/rust/") || file.starts_with("/rustc/")
}

/// Returns the name of a scope's source file, relative to its package where the compiler was told
/// so, but with its folder if it is of Rust's standard library. `None` for null and for a scope
/// without a file.
///
/// # Safety
///
/// `scope` is null or a scope of a live module.
unsafe fn file_of(f: &Functions, scope: Ref) -> Option<String> {
    let text = |get: unsafe extern "C" fn(Ref, *mut c_uint) -> *const c_char, file: Ref| {
        let mut length = 0;
        // SAFETY: `get` is one of the two functions below, and `file` is live; the text is copied.
        let text = unsafe { bytes(get(file, &mut length).cast(), length as usize) };
        String::from_utf8_lossy(text).into_owned()
    };
    // SAFETY: the caller passes null, which is not passed on, or a live scope.
    let file = if scope.is_null() { scope } else { unsafe { (f.LLVMDIScopeGetFile)(scope) } };
    if file.is_null() {
        return None;
    }
    let name = text(f.LLVMDIFileGetFilename, file);
    let whole = format!("{}/{name}", text(f.LLVMDIFileGetDirectory, file));
    Some(if is_of_rust(&whole) { whole } else { name })
}

impl Function<'_> {
    /// Returns whether its source is not of Rust's standard library. `false` for a function without
    /// debug information, such as one that the compiler made.
    pub(crate) fn is_of_user(self) -> bool {
        let f = self.functions();
        // SAFETY: the value is a function, whose scope is null where it has none.
        let file = unsafe { file_of(f, (f.LLVMGetSubprogram)(self.raw())) };
        file.is_some_and(|file| !is_of_rust(&file))
    }
}

impl Instruction<'_> {
    /// Returns the user's line that the instruction is from, as `file:line:column`: that of the
    /// innermost call which is not in Rust's standard library.
    pub(crate) fn place(self) -> Option<String> {
        let f = self.functions();
        // SAFETY: the value is an instruction; a location has a scope and perhaps one at which it
        // is inlined. Null is not passed on.
        unsafe {
            let mut location = (f.LLVMInstructionGetDebugLoc)(self.raw());
            let mut last = None;
            while !location.is_null() {
                let line = (f.LLVMDILocationGetLine)(location);
                let column = (f.LLVMDILocationGetColumn)(location);
                if let Some(file) = file_of(f, (f.LLVMDILocationGetScope)(location)) {
                    last = Some(format!("{file}:{line}:{column}"));
                    if line > 0 && !is_of_rust(&file) {
                        break;
                    }
                }
                location = (f.LLVMDILocationGetInlinedAt)(location);
            }
            last
        }
    }

    /// Returns why GPUs have no code for the instruction, at which LLVM would abort.
    pub(crate) fn unsupported(self) -> Option<&'static str> {
        let operands = self.operands();
        let has = |test: fn(&Value<'_>) -> bool| test(&self) || operands.iter().any(test);
        if has(|value| value.is_f128()) {
            Some("it computes with f128; GPUs have f32 and f64")
        } else if self.opcode() == Opcode::FloatCast && has(|value| value.is_wide_integer()) {
            Some("it converts between a 128-bit integer and a float; convert u64 or i64 instead")
        } else {
            None
        }
    }
}

impl Value<'_> {
    fn is_f128(self) -> bool {
        let f = self.functions();
        // SAFETY: any value has a type.
        unsafe { (f.LLVMGetTypeKind)((f.LLVMTypeOf)(self.raw())) == FP128 }
    }

    fn is_wide_integer(self) -> bool {
        let f = self.functions();
        // SAFETY: any value has a type, and an integer's has a width.
        unsafe {
            let ty = (f.LLVMTypeOf)(self.raw());
            (f.LLVMGetTypeKind)(ty) == INTEGER && (f.LLVMGetIntTypeWidth)(ty) > 64
        }
    }
}
