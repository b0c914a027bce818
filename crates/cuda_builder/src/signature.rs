//! Reads the signatures of a bitcode file's functions, to check a binding's declarations.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::llvm::{AttributePlace, Context, Function, Linkage, Llvm, Module, Result, Value};

/// A function of a bitcode file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// The symbol name.
    pub name: String,
    /// The parameters, in order.
    pub params: Vec<SignatureParam>,
    /// LLVM's return type, `void` or `i32`, or a struct's name in C.
    pub returns: String,
}

/// A parameter of a function of a bitcode file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignatureParam {
    /// LLVM's type: `i32`, `ptr`.
    pub ty: String,
    /// The struct that C passes by value, if the parameter is a pointer to the caller's copy.
    pub by_value: Option<ByValue>,
    /// LLVM's `dereferenceable` size in bytes, for a C++ reference.
    pub dereferenceable: Option<u64>,
}

/// A struct that C passes by value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByValue {
    /// The name in C.
    pub name: String,
    /// The size in bytes.
    pub size: u64,
}

/// Returns the exported functions of a bitcode file, by name.
pub(crate) fn signatures(llvm: &Llvm, bitcode: &Path) -> Result<Vec<Signature>> {
    let context = Context::new(llvm);
    let module = context.read_lazily(bitcode)?;
    let local = [Linkage::INTERNAL, Linkage::PRIVATE];
    let functions = module.functions().into_iter();
    let exported = functions.filter(|f| !f.is_declaration() && !local.contains(&f.linkage()));
    let mut signatures: Vec<Signature> =
        exported.map(|function| signature(&module, function)).collect::<Result<_>>()?;
    signatures.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(signatures)
}

fn signature(module: &Module<'_>, function: Function<'_>) -> Result<Signature> {
    let context = module.context();
    // Only the kinds of these attributes are used.
    let (by_value, references) = (context.by_value(1)?, context.attribute("dereferenceable")?);
    let param = |(index, value): (usize, Value<'_>)| {
        let at = AttributePlace::Argument(index as u32);
        let copied = function.attribute_type(at, by_value);
        SignatureParam {
            ty: value.ty().text(),
            by_value: copied
                .map(|ty| ByValue { name: struct_name(&ty.text()), size: module.size_of(ty) }),
            dereferenceable: function.attribute_value(at, references),
        }
    };
    Ok(Signature {
        name: function.name(),
        params: function.parameters().into_iter().enumerate().map(param).collect(),
        returns: struct_name(&function.return_type().text()),
    })
}

/// Returns `ncclTeam` for LLVM's `%struct.ncclTeam`; other types unchanged.
fn struct_name(ty: &str) -> String {
    ty.strip_prefix("%struct.").unwrap_or(ty).to_owned()
}
