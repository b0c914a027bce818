//! The instances of a generic kernel: every combination of the listed types and constants.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Error, Expr, GenericArgument, GenericParam, Generics, Ident, Lit, Result, Type};

use crate::args::KernelArgs;

/// One value for each generic parameter, in the order of the parameters.
pub struct Instance<'a> {
    params: Vec<&'a GenericParam>,
    values: Vec<&'a GenericArgument>,
    suffixes: Vec<String>,
}

impl Instance<'_> {
    /// The entry's name: the kernel's, then each value.
    pub fn entry(&self, kernel: &Ident) -> String {
        let mut name = kernel.to_string();
        for suffix in &self.suffixes {
            name.push('_');
            name.push_str(suffix);
        }
        name
    }

    /// The values, as generic arguments.
    pub fn arguments(&self) -> &[&GenericArgument] {
        &self.values
    }

    /// `type T = f32; const N: usize = 4;`
    pub fn aliases(&self) -> TokenStream {
        self.params
            .iter()
            .zip(&self.values)
            .map(|(param, value)| match param {
                GenericParam::Const(param) => {
                    let (name, ty) = (&param.ident, &param.ty);
                    quote! { #[allow(dead_code)] const #name: #ty = #value; }
                }
                param => {
                    let name = ident(param);
                    quote! { #[allow(dead_code, non_camel_case_types)] type #name = #value; }
                }
            })
            .collect()
    }

    /// Each parameter's name and what stands for it.
    pub fn names(&self) -> Vec<(&Ident, String)> {
        self.params.iter().map(|param| ident(param)).zip(self.suffixes.iter().cloned()).collect()
    }
}

/// Every combination, with different names.
pub fn of<'a>(
    args: &'a KernelArgs,
    kernel: &Ident,
    generics: &'a Generics,
) -> Result<Vec<Instance<'a>>> {
    for (name, _) in &args.lists {
        if !generics.params.iter().any(|param| ident(param) == name) {
            let text = format!("`{kernel}` has no generic parameter `{name}`");
            return Err(Error::new(name.span(), text));
        }
    }
    let mut instances = vec![Instance { params: vec![], values: vec![], suffixes: vec![] }];
    for param in &generics.params {
        let list = list_of(args, kernel, param)?;
        let mut longer = vec![];
        for instance in &instances {
            for value in list {
                longer.push(Instance {
                    params: [&instance.params[..], &[param]].concat(),
                    values: [&instance.values[..], &[value]].concat(),
                    suffixes: [&instance.suffixes[..], &[suffix(value)?]].concat(),
                });
            }
        }
        instances = longer;
    }
    let mut entries = std::collections::HashSet::new();
    for instance in &instances {
        let entry = instance.entry(kernel);
        if !entries.insert(entry.clone()) {
            let text = format!("two instances would both be named `{entry}`");
            return Err(Error::new_spanned(instance.values.last(), text));
        }
    }
    Ok(instances)
}

fn list_of<'a>(
    args: &'a KernelArgs,
    kernel: &Ident,
    param: &GenericParam,
) -> Result<&'a [GenericArgument]> {
    let name = ident(param);
    let example = match param {
        GenericParam::Lifetime(_) => {
            let text = "a kernel has no lifetimes: its arguments come from the host as plain bytes";
            return Err(Error::new_spanned(param, text));
        }
        GenericParam::Type(_) => "f32, f16",
        GenericParam::Const(_) => "1, 2",
    };
    let Some((_, list)) = args.lists.iter().find(|(listed, _)| listed == name) else {
        let what = if matches!(param, GenericParam::Type(_)) { "types" } else { "values" };
        let text = format!(
            "list the {what} of `{name}` that `{kernel}` is compiled for: #[kernel({name} = [{example}])]"
        );
        return Err(Error::new_spanned(name, text));
    };
    for value in list {
        let fits = match param {
            GenericParam::Const(_) => matches!(value, GenericArgument::Const(_)),
            _ => matches!(value, GenericArgument::Type(_)),
        };
        if !fits {
            let what = if matches!(param, GenericParam::Type(_)) { "type" } else { "literal" };
            let text = format!("`{name}` takes a {what} here");
            return Err(Error::new_spanned(value, text));
        }
    }
    Ok(list)
}

fn ident(param: &GenericParam) -> &Ident {
    match param {
        GenericParam::Lifetime(param) => &param.lifetime.ident,
        GenericParam::Type(param) => &param.ident,
        GenericParam::Const(param) => &param.ident,
    }
}

/// What a value adds to the entry's name: the last segment of a path, or the digits of a constant.
fn suffix(value: &GenericArgument) -> Result<String> {
    match value {
        GenericArgument::Type(Type::Path(path)) => {
            if let Some(last) = path.path.segments.last()
                && last.arguments.is_none()
            {
                return Ok(last.ident.to_string());
            }
        }
        GenericArgument::Const(Expr::Lit(literal)) => match &literal.lit {
            Lit::Int(number) => return Ok(number.base10_digits().to_owned()),
            Lit::Bool(flag) => return Ok(flag.value.to_string()),
            _ => {}
        },
        _ => {}
    }
    let text = "this value gives the entry no name: list a type by name (an alias will do), \
                or an integer or bool literal";
    Err(Error::new_spanned(value, text))
}
