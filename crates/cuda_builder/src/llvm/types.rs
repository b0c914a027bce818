//! LLVM types, as far as signatures need them.

use std::ffi::CStr;
use std::marker::PhantomData;

use super::functions::{Functions, Ref};
use super::{Attribute, AttributePlace, Function, Module, Value};

/// An LLVM type. It belongs to the context (`LLVMContext`) of the module `'m`.
#[derive(Clone, Copy)]
pub(crate) struct Type<'m> {
    raw: Ref,
    f: &'m Functions,
    context: PhantomData<&'m ()>,
}

impl PartialEq for Type<'_> {
    /// Types are unique within a context.
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Type<'_> {
    /// Returns LLVM's text; a struct is its name, without its fields.
    pub(crate) fn text(self) -> String {
        // SAFETY: any type has a text, NUL-terminated and owned; it is freed once, after the copy.
        let text = unsafe {
            let raw = (self.f.LLVMPrintTypeToString)(self.raw);
            let text = CStr::from_ptr(raw).to_string_lossy().into_owned();
            (self.f.LLVMDisposeMessage)(raw);
            text
        };
        text.split(" = ").next().unwrap_or_default().to_owned()
    }
}

impl<'m> Value<'m> {
    fn in_type(self, raw: Ref) -> Type<'m> {
        Type { raw, f: self.functions(), context: PhantomData }
    }

    /// Returns the type of the stack variable (`alloca`) that this value is the address of.
    pub(crate) fn allocated_type(self) -> Option<Type<'m>> {
        let f = self.functions();
        // SAFETY: the test takes any live value, and only an alloca is queried.
        unsafe {
            let is_alloca = !(f.LLVMIsAAllocaInst)(self.raw()).is_null();
            is_alloca.then(|| self.in_type((f.LLVMGetAllocatedType)(self.raw())))
        }
    }

    pub(crate) fn ty(self) -> Type<'m> {
        // SAFETY: any value has a type.
        self.in_type(unsafe { (self.functions().LLVMTypeOf)(self.raw()) })
    }
}

impl<'m> Function<'m> {
    /// Returns the function type.
    pub(crate) fn signature(self) -> Type<'m> {
        // SAFETY: a function is a global, whose value type is the function's.
        self.in_type(unsafe { (self.functions().LLVMGlobalGetValueType)(self.raw()) })
    }

    pub(crate) fn return_type(self) -> Type<'m> {
        // SAFETY: the type is a function's, so it has a result type.
        self.in_type(unsafe { (self.functions().LLVMGetReturnType)(self.signature().raw) })
    }

    /// Returns the type in the function's attribute of the same kind as `attribute`. That kind has
    /// a type, as `byval` and `sret` do.
    pub(crate) fn attribute_type(
        self,
        at: AttributePlace,
        attribute: Attribute<'_>,
    ) -> Option<Type<'m>> {
        let f = self.functions();
        let own = self.attribute_at(at, attribute)?;
        // SAFETY: `own` has the kind of `attribute`, which callers make with a type.
        Some(self.in_type(unsafe { (f.LLVMGetTypeAttributeValue)(own) }))
    }
}

impl Module<'_> {
    /// Returns the size of a type in this module's data layout, in bytes.
    pub(crate) fn size_of(&self, ty: Type<'_>) -> u64 {
        let f = ty.f;
        // SAFETY: the layout is the live module's own; the queried types are parameters', which
        // have a size.
        unsafe { (f.LLVMABISizeOfType)((f.LLVMGetModuleDataLayout)(self.raw()), ty.raw) }
    }
}
