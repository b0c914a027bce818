//! LLVM values: functions, variables, instructions, constants.

use std::hash::{Hash, Hasher};
use std::marker::PhantomData;
use std::ops::Deref;

use super::functions::{Functions, Ref};
use super::{Attribute, AttributePlace};

/// A value of a module; copies refer to the same value.
#[derive(Clone, Copy)]
pub(crate) struct Value<'m> {
    raw: Ref,
    f: &'m Functions,
    module: PhantomData<&'m ()>,
}

impl PartialEq for Value<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for Value<'_> {}

impl Hash for Value<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.raw.hash(state);
    }
}

/// Iterates over one of LLVM's linked lists of values.
///
/// # Safety
///
/// `first` is null or a live value that `next` takes, as is each result of `next`.
pub(super) unsafe fn list<'m>(
    f: &'m Functions,
    first: Ref,
    next: unsafe extern "C" fn(Ref) -> Ref,
) -> impl Iterator<Item = Value<'m>> {
    let some = |raw: Ref| (!raw.is_null()).then_some(raw);
    // SAFETY: the caller passes live values, which `next` takes; null is not passed on.
    std::iter::successors(some(first), move |raw| some(unsafe { next(*raw) }))
        .map(move |raw| Value { raw, f, module: PhantomData })
}

impl<'m> Value<'m> {
    pub(super) fn raw(self) -> Ref {
        self.raw
    }

    pub(super) fn functions(self) -> &'m Functions {
        self.f
    }

    fn value(self, raw: Ref) -> Self {
        Self { raw, f: self.f, module: PhantomData }
    }

    /// Returns whether `test`, one of LLVM's `IsA` functions, accepts the value.
    fn is_a(self, test: unsafe extern "C" fn(Ref) -> Ref) -> bool {
        // SAFETY: the `IsA` functions take any live value.
        unsafe { !test(self.raw).is_null() }
    }

    pub(crate) fn name(self) -> String {
        let mut length = 0;
        // SAFETY: LLVM returns a pointer to the value's name and its length; the name is copied
        // before anything can change it.
        unsafe {
            let start = (self.f.LLVMGetValueName2)(self.raw, &mut length);
            String::from_utf8_lossy(bytes(start.cast(), length)).into_owned()
        }
    }

    pub(crate) fn set_name(self, name: &str) {
        // SAFETY: pointer and length belong together, and LLVM copies the text.
        unsafe { (self.f.LLVMSetValueName2)(self.raw, name.as_ptr().cast(), name.len()) }
    }

    pub(crate) fn as_function(self) -> Option<Function<'m>> {
        self.is_a(self.f.LLVMIsAFunction).then_some(Function(Global(self)))
    }

    pub(crate) fn as_variable(self) -> Option<Global<'m>> {
        self.is_a(self.f.LLVMIsAGlobalVariable).then_some(Global(self))
    }

    pub(crate) fn as_instruction(self) -> Option<Instruction<'m>> {
        self.is_a(self.f.LLVMIsAInstruction).then_some(Instruction(self))
    }

    pub(crate) fn is_inline_asm(self) -> bool {
        self.is_a(self.f.LLVMIsAInlineAsm)
    }

    /// Returns whether this is assembly without side effects: Rust's `pure`.
    pub(crate) fn is_pure_asm(self) -> bool {
        // SAFETY: the value is assembly, as checked.
        self.is_inline_asm() && unsafe { (self.f.LLVMGetInlineAsmHasSideEffects)(self.raw) == 0 }
    }

    pub(crate) fn is_undefined(self) -> bool {
        // SAFETY: the function takes any live value.
        unsafe { (self.f.LLVMIsUndef)(self.raw) != 0 }
    }

    pub(crate) fn as_integer(self) -> Option<i64> {
        // SAFETY: the value is an integer constant, as checked.
        self.is_a(self.f.LLVMIsAConstantInt)
            .then(|| unsafe { (self.f.LLVMConstIntGetSExtValue)(self.raw) })
    }

    /// Returns the bytes of a constant byte array, also within a struct of one field, which rustc
    /// uses for every static.
    pub(crate) fn as_bytes(self) -> Option<Vec<u8>> {
        let mut length = 0;
        // SAFETY: both functions take a constant with data, as checked; the second one if it is an
        // array of bytes, which the first one tells. The text is copied.
        let own = unsafe {
            let is_text = self.is_a(self.f.LLVMIsAConstantDataSequential)
                && (self.f.LLVMIsConstantString)(self.raw) != 0;
            is_text.then(|| {
                let start = (self.f.LLVMGetAsString)(self.raw, &mut length);
                bytes(start.cast(), length).to_vec()
            })
        };
        own.or_else(|| match self.operands()[..] {
            [only] => only.as_bytes(),
            _ => None,
        })
    }

    /// Returns the value's operands; empty for arguments and blocks.
    pub(crate) fn operands(self) -> Vec<Value<'m>> {
        if !self.is_a(self.f.LLVMIsAUser) {
            return Vec::new();
        }
        // SAFETY: the value has operands, as checked, and the indices are valid.
        let operand = |i| self.value(unsafe { (self.f.LLVMGetOperand)(self.raw, i) });
        // SAFETY: the value has operands, as checked.
        let count = unsafe { (self.f.LLVMGetNumOperands)(self.raw) };
        (0..count.cast_unsigned()).map(operand).collect()
    }

    /// Panics if the attribute is of another context than this value.
    fn check_context(self, attribute: Attribute<'_>) {
        // SAFETY: any value has a type, and a type a context.
        let own = unsafe { (self.f.LLVMGetTypeContext)((self.f.LLVMTypeOf)(self.raw)) };
        assert_eq!(own, attribute.context, "an attribute is used in its own context");
    }

    /// Returns the users of this value, once per use.
    pub(crate) fn users(self) -> Vec<Value<'m>> {
        // SAFETY: any value has a list of uses, and each use a user.
        unsafe {
            let first = (self.f.LLVMGetFirstUse)(self.raw);
            let uses = list(self.f, first, self.f.LLVMGetNextUse);
            uses.map(|one| self.value((self.f.LLVMGetUser)(one.raw))).collect()
        }
    }
}

/// Returns bytes that LLVM keeps; none for null.
///
/// # Safety
///
/// `start` is null, or points to `length` live bytes.
pub(super) unsafe fn bytes<'a>(start: *const u8, length: usize) -> &'a [u8] {
    if start.is_null() {
        return &[];
    }
    // SAFETY: the caller passes the start of `length` bytes that LLVM keeps.
    unsafe { std::slice::from_raw_parts(start, length) }
}

/// Linkage of a symbol, with LLVM's numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Linkage(pub(super) i32);

impl Linkage {
    /// `linkonce_odr`: a definition that is linked only if used. All copies are equal, so LLVM may
    /// inline it.
    pub(crate) const LINK_ONCE: Self = Self(3);
    pub(crate) const APPENDING: Self = Self(7);
    pub(crate) const INTERNAL: Self = Self(8);
    pub(crate) const PRIVATE: Self = Self(9);
}

/// A function, a variable or an alias.
#[derive(Clone, Copy)]
pub(crate) struct Global<'m>(Value<'m>);

impl<'m> Deref for Global<'m> {
    type Target = Value<'m>;
    fn deref(&self) -> &Value<'m> {
        &self.0
    }
}

impl<'m> Global<'m> {
    /// Returns the global that `value` is. It comes from a module's list of variables or aliases.
    pub(super) fn new(value: Value<'m>) -> Self {
        Self(value)
    }

    pub(crate) fn is_declaration(self) -> bool {
        // SAFETY: the value is a global.
        unsafe { (self.f.LLVMIsDeclaration)(self.raw) != 0 }
    }

    pub(crate) fn linkage(self) -> Linkage {
        // SAFETY: the value is a global.
        Linkage(unsafe { (self.f.LLVMGetLinkage)(self.raw) })
    }

    pub(crate) fn set_linkage(self, linkage: Linkage) {
        // SAFETY: the value is a global, and the number one of LLVM's.
        unsafe { (self.f.LLVMSetLinkage)(self.raw, linkage.0) }
    }

    /// Returns the linker section, empty when none is set.
    pub(crate) fn section(self) -> String {
        // SAFETY: the value is a global; the text, null or NUL-terminated, is copied.
        unsafe {
            let text = (self.f.LLVMGetSection)(self.raw);
            let length =
                if text.is_null() { 0 } else { std::ffi::CStr::from_ptr(text).count_bytes() };
            String::from_utf8_lossy(bytes(text.cast(), length)).into_owned()
        }
    }

    /// Returns the initial value of a variable.
    pub(crate) fn initializer(self) -> Option<Value<'m>> {
        let variable = self.as_variable()?;
        // SAFETY: the value is a variable; null for a declaration.
        let raw = unsafe { (self.f.LLVMGetInitializer)(variable.raw) };
        (!raw.is_null()).then(|| self.value(raw))
    }

    /// Makes the global internal, under a name without meaning to LLVM, so that a pass removes it.
    pub(crate) fn retire(self) {
        self.set_linkage(Linkage::INTERNAL);
        self.set_name(&format!("retired.{}", self.name()));
    }
}

/// A function.
#[derive(Clone, Copy)]
pub(crate) struct Function<'m>(Global<'m>);

impl<'m> Deref for Function<'m> {
    type Target = Global<'m>;
    fn deref(&self) -> &Global<'m> {
        &self.0
    }
}

impl<'m> Function<'m> {
    /// Returns the function that `value` is. It comes from a module's list of functions.
    pub(super) fn new(value: Value<'m>) -> Self {
        Self(Global(value))
    }

    pub(crate) fn global(self) -> Global<'m> {
        self.0
    }

    /// Returns whether this is a kernel entry.
    pub(crate) fn is_kernel(self) -> bool {
        const PTX_KERNEL: u32 = 71;
        // SAFETY: the value is a function.
        unsafe { (self.f.LLVMGetFunctionCallConv)(self.raw()) == PTX_KERNEL }
    }

    /// Returns whether this is an LLVM intrinsic.
    pub(crate) fn is_intrinsic(self) -> bool {
        self.name().starts_with("llvm.")
    }

    /// Removes the personality function, which rustc sets on callers of `extern "C-unwind"`
    /// functions. Only landing pads need it; call this after they are removed.
    pub(crate) fn remove_personality(self) {
        // SAFETY: the value is a function; null removes its personality.
        unsafe {
            if (self.f.LLVMHasPersonalityFn)(self.raw()) != 0 {
                (self.f.LLVMSetPersonalityFn)(self.raw(), std::ptr::null_mut());
            }
        }
    }

    pub(crate) fn parameters(self) -> Vec<Value<'m>> {
        // SAFETY: the value is a function, and the indices are valid.
        let parameter = |i| self.value(unsafe { (self.f.LLVMGetParam)(self.raw(), i) });
        // SAFETY: the value is a function.
        let count = unsafe { (self.f.LLVMCountParams)(self.raw()) };
        (0..count).map(parameter).collect()
    }

    /// Returns all instructions; none if the body was not read.
    pub(crate) fn instructions(self) -> Vec<Instruction<'m>> {
        let f = self.f;
        // SAFETY: a function has a list of blocks, and a block one of instructions.
        unsafe {
            let blocks = list(f, (f.LLVMGetFirstBasicBlock)(self.raw()), f.LLVMGetNextBasicBlock);
            let body = blocks.flat_map(|block| {
                list(f, (f.LLVMGetFirstInstruction)(block.raw), f.LLVMGetNextInstruction)
            });
            body.map(Instruction).collect()
        }
    }

    pub(crate) fn add_attribute(self, at: AttributePlace, attribute: Attribute<'_>) {
        self.check_context(attribute);
        // SAFETY: the value is a function, and the attribute of its context.
        unsafe { (self.f.LLVMAddAttributeAtIndex)(self.raw(), at.index(), attribute.raw) }
    }

    /// Removes the function's attribute of the same kind.
    pub(crate) fn remove_attribute(self, at: AttributePlace, attribute: Attribute<'_>) {
        // SAFETY: the value is a function.
        unsafe {
            let kind = (self.f.LLVMGetEnumAttributeKind)(attribute.raw);
            (self.f.LLVMRemoveEnumAttributeAtIndex)(self.raw(), at.index(), kind);
        }
    }

    pub(crate) fn has_attribute(self, at: AttributePlace, attribute: Attribute<'_>) -> bool {
        self.attribute_value(at, attribute).is_some()
    }

    /// Returns the value of the function's attribute of the same kind, if it has one.
    pub(crate) fn attribute_value(
        self,
        at: AttributePlace,
        attribute: Attribute<'_>,
    ) -> Option<u64> {
        let own = self.attribute_at(at, attribute)?;
        // SAFETY: the handle is an attribute's; callers use kinds without a type.
        Some(unsafe { (self.f.LLVMGetEnumAttributeValue)(own) })
    }

    /// Returns the function's attribute of the same kind, if it has one.
    pub(super) fn attribute_at(self, at: AttributePlace, attribute: Attribute<'_>) -> Option<Ref> {
        // SAFETY: the value is a function; null without such an attribute.
        let own = unsafe {
            let kind = (self.f.LLVMGetEnumAttributeKind)(attribute.raw);
            (self.f.LLVMGetEnumAttributeAtIndex)(self.raw(), at.index(), kind)
        };
        (!own.is_null()).then_some(own)
    }

    /// Returns whether the function has one use, a call.
    pub(crate) fn is_called_once(self) -> bool {
        let [user] = self.users()[..] else { return false };
        user.as_instruction()
            .and_then(Instruction::call)
            .is_some_and(|(called, _)| called == *self.0)
    }
}

/// The opcodes that the builder distinguishes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Opcode {
    Call,
    Load,
    /// A `getelementptr`.
    Address,
    /// A conversion between an integer and a float.
    FloatCast,
    Other,
}

/// An instruction.
#[derive(Clone, Copy)]
pub(crate) struct Instruction<'m>(Value<'m>);

impl<'m> Deref for Instruction<'m> {
    type Target = Value<'m>;
    fn deref(&self) -> &Value<'m> {
        &self.0
    }
}

impl<'m> Instruction<'m> {
    pub(crate) fn opcode(self) -> Opcode {
        // SAFETY: the value is an instruction. The numbers are fixed by LLVM's C interface.
        match unsafe { (self.f.LLVMGetInstructionOpcode)(self.raw) } {
            // A call, an invoke, and a call that may branch (`asm goto`).
            45 | 5 | 67 => Opcode::Call,
            27 => Opcode::Load,
            29 => Opcode::Address,
            33..=36 => Opcode::FloatCast,
            _ => Opcode::Other,
        }
    }

    /// Returns a call's callee and number of arguments.
    pub(crate) fn call(self) -> Option<(Value<'m>, usize)> {
        // SAFETY: the value is a call, as checked.
        (self.opcode() == Opcode::Call).then(|| unsafe {
            let called = self.value((self.f.LLVMGetCalledValue)(self.raw));
            (called, (self.f.LLVMGetNumArgOperands)(self.raw) as usize)
        })
    }

    /// Returns the base pointer and constant byte offset of an address computation.
    pub(crate) fn address(self) -> Option<(Value<'m>, i64)> {
        const POINTER_AND_INDEX: usize = 2;
        let operands = self.operands();
        if self.opcode() != Opcode::Address || operands.len() != POINTER_AND_INDEX {
            return None;
        }
        // SAFETY: the value is an address computation, as checked, so it has an element type.
        // Types are unique within a context, so comparing their handles is enough.
        let counts_bytes = unsafe {
            let element = (self.f.LLVMGetGEPSourceElementType)(self.raw);
            element == (self.f.LLVMInt8TypeInContext)((self.f.LLVMGetTypeContext)(element))
        };
        let bytes = operands[1].as_integer()?;
        counts_bytes.then_some((operands[0], bytes))
    }

    /// Replaces `memcpy(to, from, ..)` of `words` 8-byte integers followed by a pointer by loads
    /// and stores of each. The caller does not use the instruction again.
    pub(crate) fn split_copy(self, words: u64) {
        const UNNAMED: *const std::ffi::c_char = c"".as_ptr();
        let (operands, f) = (self.operands(), self.f);
        let [to, from, ..] = operands[..] else { return };
        // SAFETY: the copy is an instruction of a live module, `to` and `from` are its pointers,
        // and the instructions built before it have matching types. The copy has no users, since it
        // returns nothing, and the caller keeps no copy of the handle.
        unsafe {
            let context = (f.LLVMGetTypeContext)((f.LLVMTypeOf)(to.raw));
            let word = (f.LLVMInt64TypeInContext)(context);
            let pointer = (f.LLVMPointerTypeInContext)(context, 0);
            let builder = (f.LLVMCreateBuilderInContext)(context);
            (f.LLVMPositionBuilderBefore)(builder, self.raw);
            for index in 0..=words {
                let ty = if index < words { word } else { pointer };
                let mut at = (f.LLVMConstInt)(word, index, 0);
                let mut address =
                    |base: Self| (f.LLVMBuildGEP2)(builder, word, base.raw, &mut at, 1, UNNAMED);
                let (from, to) = (address(Self(from)), address(Self(to)));
                let value = (f.LLVMBuildLoad2)(builder, ty, from, UNNAMED);
                (f.LLVMBuildStore)(builder, value, to);
            }
            (f.LLVMDisposeBuilder)(builder);
            (f.LLVMInstructionEraseFromParent)(self.raw);
        }
    }

    /// Removes a call that returns nothing from its function. The caller does not use it again.
    pub(crate) fn remove(self) {
        // SAFETY: the instruction is of a live module; it has no users, since it returns nothing,
        // and the caller keeps no copy of the handle.
        unsafe { (self.f.LLVMInstructionEraseFromParent)(self.raw) }
    }

    /// Removes the metadata of a kind; no-op for an instruction without it.
    pub(crate) fn remove_metadata(self, kind: &str) {
        let f = self.f;
        // SAFETY: the value is an instruction, name and length belong together, and null stands for
        // no metadata.
        unsafe {
            let context = (f.LLVMGetTypeContext)((f.LLVMTypeOf)(self.raw));
            let length = kind.len() as u32;
            let kind = (f.LLVMGetMDKindIDInContext)(context, kind.as_ptr().cast(), length);
            (f.LLVMSetMetadata)(self.raw, kind, std::ptr::null_mut());
        }
    }

    /// Removes a call's attribute of the same kind; no-op for other instructions.
    pub(crate) fn remove_attribute(self, at: AttributePlace, attribute: Attribute<'_>) {
        if self.opcode() == Opcode::Call {
            // SAFETY: the value is a call.
            unsafe {
                let kind = (self.f.LLVMGetEnumAttributeKind)(attribute.raw);
                (self.f.LLVMRemoveCallSiteEnumAttribute)(self.raw, at.index(), kind);
            }
        }
    }

    /// Adds an attribute to a call; no-op for other instructions.
    pub(crate) fn add_attribute(self, at: AttributePlace, attribute: Attribute<'_>) {
        if self.opcode() == Opcode::Call {
            self.check_context(attribute);
            // SAFETY: the value is a call, and the attribute of its context.
            unsafe { (self.f.LLVMAddCallSiteAttribute)(self.raw, at.index(), attribute.raw) }
        }
    }
}
