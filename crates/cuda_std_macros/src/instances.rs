//! Lists the instances of a generic kernel: every combination of the listed types and constants,
//! and of GIN's back ends in a kernel for GIN.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::ext::IdentExt;
use syn::{
    Error, Expr, GenericArgument, GenericParam, Generics, Ident, Lit, Result, Type, TypeParamBound,
};

use crate::args::KernelArgs;

/// An instance: a type or constant for each generic parameter, in the order of the parameters.
pub struct Instance<'a> {
    params: Vec<&'a GenericParam>,
    values: Vec<GenericArgument>,
    suffixes: Vec<String>,
    gin: Option<BackEnd>,
}

/// GIN's back end of an instance.
#[derive(Clone, Copy)]
struct BackEnd {
    /// The index of its generic parameter.
    index: usize,
    /// The suffix of its entries.
    suffix: &'static str,
}

/// GIN's back ends: the type of `nccl_device::gin`, and the suffix of its entries.
///
/// A copy of `devcomm_types::GinType::BACK_ENDS`, compared by a test: a dependency on that crate
/// would make every build of kernels compile half and zerocopy for the host too.
const BACK_ENDS: [(&str, &str); 4] =
    [("Proxy", PROXY), ("Gdaki", "gdaki"), ("Gpi", "gpi"), ("EfaGda", "efa_gda")];

/// The suffix of the back end that the simulator runs.
const PROXY: &str = "proxy";

impl Instance<'_> {
    /// Returns the name on the host: the kernel's, then a suffix for each value except the back
    /// end.
    pub fn name(&self, kernel: &Ident) -> String {
        let gin = self.gin.map(|gin| gin.index);
        let mut name = kernel.unraw().to_string();
        for (_, suffix) in self.suffixes.iter().enumerate().filter(|(index, _)| Some(*index) != gin)
        {
            name.push('_');
            name.push_str(suffix);
        }
        name
    }

    /// Returns the name of the GPU entry point: [`Self::name`], then the back end's suffix.
    pub fn entry(&self, kernel: &Ident) -> String {
        let back_end = self.gin.map(|gin| format!("_{}", gin.suffix)).unwrap_or_default();
        self.name(kernel) + &back_end
    }

    /// Returns whether the simulator runs this instance: of a kernel for GIN only the PROXY one.
    pub fn runs_on_host(&self) -> bool {
        self.gin.is_none_or(|gin| gin.suffix == PROXY)
    }

    /// Returns the values, as generic arguments.
    pub fn arguments(&self) -> &[GenericArgument] {
        &self.values
    }

    /// Returns the values without the back end, for which the host's type has no parameter.
    pub fn item_arguments(&self) -> Vec<&GenericArgument> {
        let gin = self.gin.map(|gin| gin.index);
        let values = self.values.iter().enumerate();
        values.filter(|(index, _)| Some(*index) != gin).map(|(_, value)| value).collect()
    }

    /// Returns code that names the values: `type T = f32; const N: usize = 4;`.
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

    /// Returns each parameter's name and its value as text.
    pub fn names(&self) -> Vec<(&Ident, String)> {
        self.params.iter().map(|param| ident(param)).zip(self.suffixes.iter().cloned()).collect()
    }
}

/// Returns all instances. Two entry points with the same name are an error.
pub fn all<'a>(
    args: &'a KernelArgs,
    kernel: &Ident,
    generics: &'a Generics,
) -> Result<Vec<Instance<'a>>> {
    for name in args.lists.iter().map(|(name, _)| name).chain(&args.gin) {
        if !generics.params.iter().any(|param| ident(param) == name) {
            let text = format!("`{kernel}` has no generic parameter `{name}`");
            return Err(Error::new(name.span(), text));
        }
    }
    let mut instances =
        vec![Instance { params: vec![], values: vec![], suffixes: vec![], gin: None }];
    for (index, param) in generics.params.iter().enumerate() {
        let list = if args.gin.as_ref() == Some(ident(param)) {
            back_ends(param, index)?
        } else {
            list_of(args, kernel, param)?.iter().map(|value| (value.clone(), None)).collect()
        };
        let mut extended = vec![];
        for instance in &instances {
            for (value, gin) in &list {
                extended.push(Instance {
                    params: [&instance.params[..], &[param]].concat(),
                    values: [&instance.values[..], std::slice::from_ref(value)].concat(),
                    suffixes: [&instance.suffixes[..], &[suffix(value)?]].concat(),
                    gin: gin.or(instance.gin),
                });
            }
        }
        instances = extended;
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

fn back_ends(
    param: &GenericParam,
    index: usize,
) -> Result<Vec<(GenericArgument, Option<BackEnd>)>> {
    if !matches!(param, GenericParam::Type(_)) {
        let text = "the back ends of GIN are types: take `B: GinBackend`";
        return Err(Error::new_spanned(param, text));
    }
    let value = |(name, suffix)| {
        let name = format_ident!("{name}");
        (syn::parse_quote!(::nccl_device::gin::#name), Some(BackEnd { index, suffix }))
    };
    Ok(BACK_ENDS.map(value).into())
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
        if is_back_end(param) {
            let text =
                format!("compile `{kernel}` for every back end of GIN: #[kernel({name} = gin)]");
            return Err(Error::new_spanned(name, text));
        }
        let what = if matches!(param, GenericParam::Type(_)) { "types" } else { "values" };
        let text = format!(
            "list the {what} of `{name}` that `{kernel}` is compiled for: \
             #[kernel({name} = [{example}])]"
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

/// Returns whether the parameter has the bound `GinBackend`.
fn is_back_end(param: &GenericParam) -> bool {
    let GenericParam::Type(param) = param else { return false };
    param.bounds.iter().any(|bound| match bound {
        TypeParamBound::Trait(bound) => {
            bound.path.segments.last().is_some_and(|last| last.ident == "GinBackend")
        }
        _ => false,
    })
}

/// Returns a parameter's name.
pub fn ident(param: &GenericParam) -> &Ident {
    match param {
        GenericParam::Lifetime(param) => &param.lifetime.ident,
        GenericParam::Type(param) => &param.ident,
        GenericParam::Const(param) => &param.ident,
    }
}

/// Returns a value's suffix in the entry point's name: the last segment of a path, or a literal's
/// value.
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

#[cfg(test)]
mod tests {
    use devcomm_types::GinType;

    #[test]
    fn back_ends_are_those_of_the_types() {
        let types = GinType::BACK_ENDS.map(|ty| (format!("{ty:?}"), ty.suffix()));
        let ours = super::BACK_ENDS.map(|(name, suffix)| (name.to_owned(), Some(suffix)));
        assert_eq!(ours, types);
    }
}
