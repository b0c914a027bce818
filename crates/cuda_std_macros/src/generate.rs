//! The code that `#[kernel]` generates.

use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::{
    Attribute, Block, Error, FnArg, Ident, ItemFn, Pat, Result, ReturnType, Signature, Type,
    TypeReference,
};

use crate::args::KernelArgs;
use crate::instances::{self, Instance};
use crate::meta::{Record, Source, type_text};

/// The most parameters that a launch's argument tuple has.
const MAX_PARAMS: usize = 12;

/// A function that may be a kernel.
struct Kernel<'a> {
    function: &'a ItemFn,
    args: &'a KernelArgs,
    source: &'a Source,
    names: Vec<&'a Ident>,
    types: Vec<&'a Type>,
}

/// Expands `#[kernel(args)] function`.
pub fn kernel(args: KernelArgs, function: ItemFn, source: &Source) -> Result<TokenStream> {
    check(&function.sig)?;
    let (names, types) = parameters(&function.sig)?;
    let kernel = Kernel { function: &function, args: &args, source, names, types };
    let instances = instances::of(&args, &function.sig.ident, &function.sig.generics)?;
    Ok(if function.sig.generics.params.is_empty() {
        kernel.plain(&instances[0])
    } else {
        kernel.generic(&instances)
    })
}

fn check(sig: &Signature) -> Result<()> {
    let refuse = |tokens: &dyn quote::ToTokens, text| Err(Error::new_spanned(tokens, text));
    if let Some(token) = &sig.asyncness {
        return refuse(token, "a kernel cannot be async");
    }
    if let Some(token) = &sig.constness {
        return refuse(token, "a kernel cannot be const");
    }
    if let Some(abi) = &sig.abi {
        return refuse(abi, "leave the ABI out: #[kernel] gives the function the ABI of a kernel");
    }
    if let Some(dots) = &sig.variadic {
        return refuse(dots, "a kernel has a fixed number of parameters");
    }
    if let ReturnType::Type(_, ty) = &sig.output {
        return refuse(ty, "a kernel returns nothing: write results through a pointer parameter");
    }
    Ok(())
}

fn parameters(sig: &Signature) -> Result<(Vec<&Ident>, Vec<&Type>)> {
    let (mut names, mut types) = (vec![], vec![]);
    for input in &sig.inputs {
        let FnArg::Typed(param) = input else {
            return Err(Error::new_spanned(input, "a kernel is a free function: it has no self"));
        };
        match &*param.pat {
            Pat::Ident(name) if name.by_ref.is_none() && name.subpat.is_none() => {
                names.push(&name.ident);
            }
            pattern => {
                let text = "a kernel's parameter is a plain name; take it apart in the body";
                return Err(Error::new_spanned(pattern, text));
            }
        }
        let refused = match &*param.ty {
            Type::ImplTrait(_) => "name the type: #[kernel(T = [..])] with a generic parameter `T`",
            Type::Reference(to) => refused_reference(to),
            _ => "",
        };
        if !refused.is_empty() {
            return Err(Error::new_spanned(&param.ty, refused));
        }
        types.push(&*param.ty);
    }
    if names.len() > MAX_PARAMS {
        let text = format!(
            "a kernel takes at most {MAX_PARAMS} parameters, this one has {}: put some in a struct",
            names.len()
        );
        return Err(Error::new_spanned(&sig.inputs, text));
    }
    Ok((names, types))
}

/// Why a kernel cannot take a reference; empty for one to a slice.
fn refused_reference(reference: &TypeReference) -> &'static str {
    match (&*reference.elem, &reference.mutability) {
        (Type::Slice(_), None) => "",
        (_, Some(_)) => {
            "a kernel takes no mutable references, since every thread of the grid would hold the same one: take a \
             pointer, and a count for a slice"
        }
        _ => {
            "a kernel takes no references but to slices, since a launch passes plain bytes: take the value, or a \
             pointer to it"
        }
    }
}

/// A parameter's type where the compiler wants its lifetime: a slice lives as long as the kernel can tell.
fn with_lifetime(ty: &Type) -> Type {
    let mut ty = ty.clone();
    if let Type::Reference(reference) = &mut ty {
        reference.lifetime.get_or_insert_with(|| syn::parse_quote!('static));
    }
    ty
}

/// Threads of a block, where a kernel does not say how many it has at most.
const MAX_THREADS: u32 = 1024;

impl Kernel<'_> {
    fn plain(&self, instance: &Instance) -> TokenStream {
        let ItemFn { vis, sig, .. } = self.function;
        let name = &sig.ident;
        let docs = self.docs();
        let entry = self.entry(quote!(#vis), quote!(#[unsafe(no_mangle)]));
        let meta = self.meta(instance);
        let layout = self.layout();
        // A value only, as a function is: a module beside it may have the name.
        let item = format_ident!("__{}_item", name);
        let traits = self.traits(instance, &quote!(#item));
        quote! {
            #[cfg(target_arch = "nvptx64")]
            #entry
            #[cfg(not(target_arch = "nvptx64"))]
            #[doc(hidden)]
            #[allow(non_camel_case_types)]
            #[derive(Clone, Copy)]
            #vis struct #item;
            #[cfg(not(target_arch = "nvptx64"))]
            #(#docs)*
            #[allow(non_upper_case_globals)]
            #vis const #name: #item = #item;
            const _: () = {
                #layout
                #[cfg(target_arch = "nvptx64")]
                #meta
                #[cfg(not(target_arch = "nvptx64"))]
                const _: () = { #traits };
            };
        }
    }

    fn generic(&self, instances: &[Instance]) -> TokenStream {
        let mut out = self.item();
        for instance in instances {
            let export = instance.entry(&self.function.sig.ident);
            let entry = self.entry(quote!(pub), quote!(#[unsafe(export_name = #export)]));
            let meta = self.meta(instance);
            let layout = self.layout();
            let aliases = instance.aliases();
            let bounds = self.bounds(instance);
            let picks = self.args.gin.as_ref().map(|_| self.picks());
            let name = &self.function.sig.ident;
            let values = instance.item_arguments();
            let traits = instance
                .is_the_hosts()
                .then(|| self.traits(instance, &quote!(#name<#(#values),*>)));
            out.extend(quote! {
                const _: () = {
                    #bounds
                    #aliases
                    #layout
                    #picks
                    #[cfg(target_arch = "nvptx64")]
                    #meta
                    #[cfg(target_arch = "nvptx64")]
                    #entry
                    #[cfg(not(target_arch = "nvptx64"))]
                    const _: () = { #traits };
                };
            });
        }
        out
    }

    /// The host's item of a generic kernel: a unit value with type parameters, so that `name::<f32>` is an expression. A
    /// generic unit struct cannot be (its parameters would be unused); an enum's unit variant of the same name can. The
    /// glob brings the variant as a value only: as a type the name is taken by the enum. A kernel that is generic over GIN's
    /// back end alone has a plain item.
    fn item(&self) -> TokenStream {
        let ItemFn { vis, sig, .. } = self.function;
        let name = &sig.ident;
        let docs = self.docs();
        let hidden = format_ident!("__{}_item", name);
        // Of its own name, so that the globs of several kernels do not meet.
        let phantom = format_ident!("__{}_phantom", name);
        let mut generics = sig.generics.clone();
        generics.where_clause = None;
        if let Some(gin) = &self.args.gin {
            let listed = generics.params.into_iter();
            generics.params = listed.filter(|param| instances::ident(param) != gin).collect();
        }
        if generics.params.is_empty() {
            return quote! {
                #[cfg(not(target_arch = "nvptx64"))]
                #(#docs)*
                #[allow(non_camel_case_types)]
                #[derive(Clone, Copy)]
                #vis struct #name;
            };
        }
        for param in generics.type_params_mut() {
            param.bounds.clear();
            param.colon_token = None;
        }
        let types: Vec<&Ident> = generics.type_params().map(|param| &param.ident).collect();
        let (full, arguments, _) = generics.split_for_impl();
        quote! {
            #[cfg(not(target_arch = "nvptx64"))]
            #[doc(hidden)]
            #[allow(missing_docs, non_camel_case_types, clippy::expl_impl_clone_on_copy, clippy::manual_non_exhaustive)]
            mod #hidden {
                #[derive(Clone, Copy)]
                pub enum Never {}
                pub enum #name #full {
                    #[doc(hidden)]
                    #name,
                    #[doc(hidden)]
                    #phantom(Never, ::core::marker::PhantomData<fn() -> (#(#types,)*)>),
                }
                impl #full ::core::clone::Clone for #name #arguments {
                    fn clone(&self) -> Self { *self }
                }
                impl #full ::core::marker::Copy for #name #arguments {}
                pub mod value {
                    #[doc(hidden)]
                    pub use super::#name::*;
                }
            }
            #[cfg(not(target_arch = "nvptx64"))]
            #(#docs)*
            #[doc(inline)]
            #vis use #hidden::#name;
            #[cfg(not(target_arch = "nvptx64"))]
            #[doc(hidden)]
            #[allow(unused_imports)]
            #vis use #hidden::value::*;
        }
    }

    /// The device's entry point. Large parameters are references there, which the builder makes parameters by value of.
    fn entry(&self, vis: TokenStream, export: TokenStream) -> TokenStream {
        let ItemFn { attrs, sig, block, .. } = self.function;
        let Signature { unsafety, ident, inputs, .. } = sig;
        let (names, types) = (&self.names, &self.types);
        let patterns = inputs.iter().map(|input| match input {
            FnArg::Typed(param) => param.pat.to_token_stream(),
            FnArg::Receiver(this) => this.to_token_stream(),
        });
        let private = quote!(::cuda_std::__private);
        let taken: Vec<TokenStream> = types
            .iter()
            .map(|ty| quote!(#private::Taken<#ty, { <#ty as #private::KernelParam>::ENTRY }>))
            .collect();
        quote! {
            #(#attrs)*
            #export
            #vis #unsafety extern "ptx-kernel" fn #ident(
                #( #names: <#taken as #private::TakeParam>::Entry ),*
            ) {
                #( let #patterns: #types = <#taken as #private::TakeParam>::take(#names); )*
                #block
            }
        }
    }

    /// The host's two traits for `item`.
    fn traits(&self, instance: &Instance, item: &TokenStream) -> TokenStream {
        let ItemFn { attrs, sig, block, .. } = self.function;
        let Signature { unsafety, inputs, .. } = sig;
        let names = &self.names;
        let types: Vec<Type> = self.types.iter().map(|ty| with_lifetime(ty)).collect();
        let name = instance.name(&sig.ident);
        let gin = self.args.gin.is_some();
        let file = &self.source.stem;
        let max_threads = self.args.max_threads.unwrap_or(MAX_THREADS);
        let attrs = attrs.iter().filter(|attr| !attr.path().is_ident("doc"));
        let body = body_fn(quote!(#(#attrs)*), quote!(#unsafety), quote!(#inputs), block);
        quote! {
            impl ::cuda_std::__private::Kernel for #item {
                const NAME: &'static str = #name;
                const GIN: bool = #gin;
                const FILE: &'static str = #file;
                type Args = (#(#types,)*);
                const BODY: ::core::option::Option<::cuda_std::__private::HostBody> =
                    ::core::option::Option::Some(
                        ::cuda_std::__private::HostBody::new::<Self>(#max_threads),
                    );
            }
            impl ::cuda_std::__private::HostKernel for #item {
                unsafe fn call((#(#names,)*): Self::Args) {
                    #body
                    #[allow(unused_unsafe)]
                    // SAFETY: the caller keeps the kernel's contract.
                    unsafe { body(#(#names),*) }
                }
            }
        }
    }

    /// Each parameter has the layout that the host will fill.
    fn layout(&self) -> TokenStream {
        let types = self.types.iter().map(|ty| with_lifetime(ty));
        quote! { #( const _: () = <#types as ::cuda_std::__private::KernelParam>::LAYOUT; )* }
    }

    /// A launch picks the back end by the device communicator.
    fn picks(&self) -> TokenStream {
        let types = &self.types;
        quote! {
            const _: () = assert!(
                false #( || <#types as ::cuda_std::__private::KernelParam>::IS_DEV_COMM )*,
                "a kernel for GIN takes a DevComm, by which a launch picks the back end"
            );
        }
    }

    /// The bounds of a generic kernel hold for the instance, although its body is compiled without them.
    fn bounds(&self, instance: &Instance) -> TokenStream {
        let (full, _, wheres) = self.function.sig.generics.split_for_impl();
        let values = instance.arguments();
        quote! {
            #[allow(dead_code)]
            const _: fn() = {
                const fn bounds #full () #wheres {}
                bounds::<#(#values),*>
            };
        }
    }

    fn meta(&self, instance: &Instance) -> TokenStream {
        let entry = instance.entry(&self.function.sig.ident);
        let values = instance.names();
        let params = self.names.iter().zip(&self.types);
        let params = params.map(|(name, ty)| (*name, type_text(ty, &values))).collect();
        let (arch, max_threads) = (self.args.arch.as_ref(), self.args.max_threads);
        Record { entry: &entry, source: self.source, arch, max_threads, params }.to_static()
    }

    fn docs(&self) -> Vec<&Attribute> {
        let shown =
            |attr: &&Attribute| attr.path().is_ident("doc") || attr.path().is_ident("deprecated");
        self.function.attrs.iter().filter(shown).collect()
    }
}

fn body_fn(
    attrs: TokenStream,
    unsafety: TokenStream,
    inputs: TokenStream,
    block: &Block,
) -> TokenStream {
    quote! {
        #attrs
        #[allow(clippy::too_many_arguments)]
        #unsafety fn body(#inputs) #block
    }
}
