//! Where in the sources an instruction is from, and the types that GPUs lack.

use super::functions::Ref;
use super::value::{Instruction, Opcode, Value, bytes};

/// LLVM's numbers of types.
const FP128: i32 = 5;
const INTEGER: i32 = 8;

/// Whether a source file is of Rust's standard library.
pub(crate) fn is_of_rust(file: &str) -> bool {
    file.contains("/rustlib/src/rust/") || file.starts_with("/rustc/")
}

impl Instruction<'_> {
    /// The user's line that the instruction is from, as `file:line:column`: that of the innermost
    /// call which is not in Rust's standard library.
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
                if let Some(file) = self.file((f.LLVMDILocationGetScope)(location)) {
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

    /// # Safety
    ///
    /// `scope` is null or a scope of this module.
    unsafe fn file(self, scope: Ref) -> Option<String> {
        let f = self.functions();
        let mut length = 0;
        // SAFETY: the caller's contract; the text is copied.
        unsafe {
            let file = if scope.is_null() { scope } else { (f.LLVMDIScopeGetFile)(scope) };
            if file.is_null() {
                return None;
            }
            let start = (f.LLVMDIFileGetFilename)(file, &mut length);
            Some(String::from_utf8_lossy(bytes(start.cast(), length as usize)).into_owned())
        }
    }

    /// What GPUs have no code for in it: LLVM would abort.
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
            let of = (f.LLVMTypeOf)(self.raw());
            (f.LLVMGetTypeKind)(of) == INTEGER && (f.LLVMGetIntTypeWidth)(of) > 64
        }
    }
}
