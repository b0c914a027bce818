//! Generates the code of `#[kernel]`: the function, the host's type that launches it, and one GPU
//! entry point per instance.

use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::{
    Attribute, Error, FnArg, Generics, Ident, ItemFn, Pat, Result, ReturnType, Signature, Type,
    TypeReference,
};

use crate::args::KernelArgs;
use crate::instances::{self, Instance};
use crate::meta::{Record, Source, type_text};
use crate::requires;

/// Maximum parameters of a kernel: `LaunchArgs` is implemented for tuples up to this size.
const MAX_PARAMS: usize = 12;

/// A kernel's function, with the names and types of its parameters.
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
    requires::check_names(&args.requires, &names)?;
    let kernel = Kernel { function: &function, args: &args, source, names, types };
    let instances = instances::all(&args, &function.sig.ident, &function.sig.generics)?;
    Ok(kernel.expand(&instances))
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

/// Returns why a kernel cannot take this reference; empty for `&[T]`, which it can take.
fn refused_reference(reference: &TypeReference) -> &'static str {
    match (&*reference.elem, &reference.mutability) {
        (Type::Slice(_), None) => "",
        (_, Some(_)) => {
            "a kernel takes no mutable references, since every thread of the grid would hold the \
             same one: take a pointer, and a count for a slice"
        }
        _ => {
            "a kernel takes no references but to slices, since a launch passes plain bytes: take \
             the value, or a pointer to it"
        }
    }
}

/// Returns the type, with lifetime `'static` if it is a reference without one: the generated impls
/// cannot elide lifetimes.
fn with_lifetime(ty: &Type) -> Type {
    let mut ty = ty.clone();
    if let Type::Reference(reference) = &mut ty {
        reference.lifetime.get_or_insert_with(|| syn::parse_quote!('static));
    }
    ty
}

/// Maximum threads per block of a kernel without `max_threads`.
const MAX_THREADS: u32 = 1024;

impl Kernel<'_> {
    fn expand(&self, instances: &[Instance]) -> TokenStream {
        let (item, function) = (self.item(), self.function());
        let instances = instances.iter().map(|instance| self.instance(instance));
        quote! { #item #function #(#instances)* }
    }

    fn is_generic(&self) -> bool {
        !self.function.sig.generics.params.is_empty()
    }

    /// Returns the host's type with the kernel's name, and its function `args`. It is not a unit
    /// struct: in the scope of one, no local variable can have its name.
    fn item(&self) -> TokenStream {
        let ItemFn { vis, sig, .. } = self.function;
        let (name, generics) = (&sig.ident, self.item_generics());
        let (full, arguments, wheres) = generics.split_for_impl();
        let fields = phantom(&generics);
        let bare = without_bounds(generics.clone());
        let (names, types) = (&self.names, self.types_with_lifetimes());
        let safety = match sig.unsafety {
            // By name, not by `Kernel::Safety`: a missing instance is then one error, not two.
            Some(_) => quote!(::cuda_std::__private::Unsafe),
            None => quote!(<Self as ::cuda_std::__private::Kernel>::Safety),
        };
        // Types that differ as the names do, and from the user's types, which have other names.
        let values: Vec<Ident> = names.iter().map(|name| format_ident!("{name}Arg")).collect();
        let docs = format!("Launches the kernel [`{name}`](fn@{name}).");
        quote! {
            #[doc = #docs]
            #[allow(non_camel_case_types, dead_code)]
            #vis struct #name #bare #fields
            #[cfg(not(target_arch = "nvptx64"))]
            impl #full #name #arguments #wheres {
                /// Returns a launch with these arguments: set its grid and block, then call
                /// `launch`.
                #[allow(dead_code, non_camel_case_types, clippy::too_many_arguments)]
                #[inline]
                pub fn args<#( #values: ::cuda_std::__private::Arg<#types> ),*>(
                    #( #names: #values ),*
                ) -> ::cuda_std::__private::Launch<
                    Self,
                    (#(#values,)*),
                    #safety,
                    ::cuda_std::__private::Unset,
                    ::cuda_std::__private::Unset,
                >
                where
                    Self: ::cuda_std::__private::Kernel<Args = (#(#types,)*)>,
                {
                    ::cuda_std::__private::Launch::new((#(#names,)*))
                }
            }
        }
    }

    /// Returns the function itself, which other kernels can call. A generic function calls
    /// `Body::call` of its instance, where `T` is a type alias, so that statics in the body can
    /// have the type `T`.
    fn function(&self) -> TokenStream {
        let ItemFn { attrs, vis, sig, block } = self.function;
        let attributes = quote! {
            #[allow(dead_code, clippy::too_many_arguments)]
        };
        if !self.is_generic() {
            return quote! { #(#attrs)* #attributes #vis #sig #block };
        }
        let Signature { unsafety, ident, generics, .. } = sig;
        let (names, types, docs) = (&self.names, self.types_with_lifetimes(), self.docs());
        let (full, arguments, wheres) = generics.split_for_impl();
        let wheres = wheres.map(|wheres| &wheres.predicates);
        let (fields, bare) = (phantom(generics), without_bounds(generics.clone()));
        let instance = self.instance_ident();
        quote! {
            #[doc(hidden)]
            #[allow(non_camel_case_types, dead_code)]
            #vis struct #instance #bare #fields
            #(#docs)*
            #attributes
            #vis #unsafety fn #ident #full(#(#names: #types),*)
            where
                #instance #arguments: ::cuda_std::__private::Body<Args = (#(#types,)*)>,
                #wheres
            {
                // SAFETY: the caller upholds the function's `# Safety` section, if it has one.
                unsafe {
                    <#instance #arguments as ::cuda_std::__private::Body>::call((#(#names,)*))
                }
            }
        }
    }

    /// Returns all items of one instance.
    fn instance(&self, instance: &Instance) -> TokenStream {
        let (aliases, layout) = (instance.aliases(), self.layout());
        let generic = self.is_generic().then(|| {
            let (bounds, body) = (self.bounds(instance), self.body(instance));
            quote! { #bounds #body }
        });
        let dev_comm_check = self.args.gin.as_ref().map(|_| self.dev_comm_check());
        let gpu = (!self.source.is_dependency).then(|| {
            let (entry, meta) = (self.entry(instance), self.meta(instance));
            quote! {
                #[cfg(target_arch = "nvptx64")]
                #meta
                #[cfg(target_arch = "nvptx64")]
                #entry
            }
        });
        let traits = instance.runs_on_host().then(|| self.traits(instance));
        let unique = self.unique(instance);
        quote! {
            #unique
            const _: () = {
                #aliases
                #generic
                #layout
                #dev_comm_check
                #gpu
                #[cfg(not(target_arch = "nvptx64"))]
                const _: () = { #traits };
            };
        }
    }

    /// Returns an item of the crate's root that the entry point's name names: two kernels of a
    /// crate with one name are an error on the host too, although their functions are in different
    /// modules.
    fn unique(&self, instance: &Instance) -> TokenStream {
        let ident = &self.function.sig.ident;
        let name = format_ident!("__kernel_named_{}", instance.entry(ident), span = ident.span());
        quote! {
            #[cfg(not(target_arch = "nvptx64"))]
            #[doc(hidden)]
            #[allow(unused_macros, non_local_definitions)]
            #[macro_export]
            macro_rules! #name { () => {}; }
        }
    }

    /// Returns the generic parameters of the host's type: all but GIN's back end, which a launch
    /// selects.
    fn item_generics(&self) -> Generics {
        let mut generics = self.function.sig.generics.clone();
        if let Some(gin) = &self.args.gin {
            let listed = generics.params.into_iter();
            generics.params = listed.filter(|param| instances::ident(param) != gin).collect();
            if let Some(wheres) = &mut generics.where_clause {
                let kept = std::mem::take(&mut wheres.predicates).into_iter();
                let names_gin =
                    |tokens: TokenStream| tokens.into_iter().any(|token| *gin == token.to_string());
                let kept = kept.filter(|predicate| !names_gin(predicate.to_token_stream()));
                wheres.predicates = kept.collect();
            }
        }
        // The types of launch arguments contain no references.
        generics.type_params_mut().for_each(|param| param.bounds.push(syn::parse_quote!('static)));
        generics
    }

    /// Returns the name of the type that implements `Body` for each instance of a generic kernel.
    fn instance_ident(&self) -> Ident {
        format_ident!("__{}_instance", self.function.sig.ident)
    }

    fn types_with_lifetimes(&self) -> Vec<Type> {
        self.types.iter().map(|ty| with_lifetime(ty)).collect()
    }

    /// Returns `Body` of a generic kernel's instance: the function with that instance's types.
    fn body(&self, instance: &Instance) -> TokenStream {
        let ItemFn { attrs, sig, block, .. } = self.function;
        let Signature { unsafety, inputs, .. } = sig;
        let attrs = attrs.iter().filter(|attr| !attr.path().is_ident("doc"));
        let (taken, types) = (self.taken(), self.types_with_lifetimes());
        let (item, values) = (self.instance_ident(), instance.arguments());
        quote! {
            impl ::cuda_std::__private::Body for #item<#(#values),*> {
                type Args = (#(#types,)*);

                unsafe fn call(args: Self::Args) {
                    #(#attrs)*
                    #[allow(clippy::too_many_arguments)]
                    #unsafety fn body(#inputs) #block
                    #[allow(unused_unsafe)]
                    // SAFETY: the caller of the launch upholds the kernel's `# Safety` section.
                    unsafe { body(#(#taken),*) }
                }
            }
        }
    }

    /// Returns the parts of the tuple `args`. Variables of the parameters' names could hide the
    /// function that takes them.
    fn taken(&self) -> Vec<TokenStream> {
        let indices = (0..self.names.len()).map(syn::Index::from);
        indices.map(|index| quote!(args.#index)).collect()
    }

    /// Returns the GPU entry point. In Rust it takes large parameters by reference; `cuda_builder`
    /// turns these into parameters by value.
    fn entry(&self, instance: &Instance) -> TokenStream {
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
        let export = instance.entry(ident);
        quote! {
            #(#attrs)*
            #[unsafe(export_name = #export)]
            pub #unsafety extern "ptx-kernel" fn entry(
                #( #names: <#taken as #private::TakeParam>::Entry ),*
            ) {
                #( let #patterns: #types = <#taken as #private::TakeParam>::take(#names); )*
                #block
            }
        }
    }

    /// Returns the host's impls of `Kernel` and `HostKernel`.
    fn traits(&self, instance: &Instance) -> TokenStream {
        let ident = &self.function.sig.ident;
        let (names, types) = (&self.names, self.types_with_lifetimes());
        let is_safe_fn = self.function.sig.unsafety.is_none();
        let name = instance.name(ident);
        let (gin, in_place) = (self.args.gin.is_some(), self.args.in_place);
        let Source { package, stem, .. } = self.source;
        let max_threads = self.args.max_threads.unwrap_or(MAX_THREADS);
        let cluster = self.args.cluster.unwrap_or(1);
        let lsa_barriers = opens_lsa_barriers(self.function.block.to_token_stream());
        let (item, call) = if self.is_generic() {
            let (values, all) = (instance.item_arguments(), instance.arguments());
            let body = self.instance_ident();
            let call = quote!(<#body<#(#all),*> as ::cuda_std::__private::Body>::call(args));
            (quote!(#ident<#(#values),*>), call)
        } else {
            let taken = self.taken();
            (quote!(#ident), quote!(#ident(#(#taken),*)))
        };
        let requires = &self.args.requires;
        let check = (!requires.is_empty()).then(|| requires::check(requires, names, &types));
        quote! {
            // SAFETY: all items are of the same function. A safe one accesses only what its
            // parameters refer to.
            unsafe impl ::cuda_std::__private::Kernel for #item {
                const NAME: &'static str = #name;
                const GIN: bool = #gin;
                const IN_PLACE: bool = #in_place;
                const PACKAGE: &'static str = #package;
                const FILE: &'static str = #stem;
                type Args = (#(#types,)*);
                type Safety = <() as ::cuda_std::__private::SafeIf<{
                    #is_safe_fn
                        && !<(#(#types,)*) as ::cuda_std::__private::KernelArgs>::HOLD_SLICE
                }>>::Safety;
                const BODY: ::core::option::Option<::cuda_std::__private::HostBody> =
                    ::core::option::Option::Some(
                        ::cuda_std::__private::HostBody::new::<Self>(
                            &[#(stringify!(#names)),*],
                            #max_threads,
                            #cluster,
                            #lsa_barriers,
                        ),
                    );
                #check
            }
            impl ::cuda_std::__private::HostKernel for #item {
                unsafe fn call(args: Self::Args) {
                    #[allow(unused_unsafe)]
                    // SAFETY: the caller of the launch upholds the kernel's `# Safety` section.
                    unsafe { #call }
                }
            }
        }
    }

    /// Asserts that each parameter has the layout of the bytes that the host passes.
    fn layout(&self) -> TokenStream {
        let types = self.types_with_lifetimes();
        quote! { #( const _: () = <#types as ::cuda_std::__private::KernelParam>::LAYOUT; )* }
    }

    /// Asserts that a kernel for GIN takes a `DevComm`, which selects the back end at launch.
    fn dev_comm_check(&self) -> TokenStream {
        let types = self.types_with_lifetimes();
        quote! {
            const _: () = assert!(
                false #( || <#types as ::cuda_std::__private::KernelParam>::IS_DEV_COMM )*,
                "a kernel for GIN takes a DevComm, by which a launch picks the back end"
            );
        }
    }

    /// Asserts that the instance's types satisfy the kernel's bounds: its body is compiled without
    /// them.
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
        let KernelArgs { arch, max_threads, min_blocks, cluster, .. } = self.args;
        let arch = arch.as_ref();
        Record {
            entry: &entry,
            source: self.source,
            arch,
            max_threads: *max_threads,
            min_blocks: *min_blocks,
            cluster: *cluster,
            params,
        }
        .to_static()
    }

    fn docs(&self) -> Vec<&Attribute> {
        let shown =
            |attr: &&Attribute| attr.path().is_ident("doc") || attr.path().is_ident("deprecated");
        self.function.attrs.iter().filter(shown).collect()
    }
}

/// Returns whether the body names a function of `nccl_device` that opens LSA barriers. For a GPU's
/// kernel the linker finds out which functions it calls; a simulated kernel has no such linker.
fn opens_lsa_barriers(body: TokenStream) -> bool {
    const FUNCTIONS: [&str; 4] =
        ["lsa_barrier", "lsa_barriers", "hybrid_lsa_barriers", "hybrid_barrier"];
    body.into_iter().any(|token| match token {
        TokenTree::Group(group) => opens_lsa_barriers(group.stream()),
        TokenTree::Ident(name) => FUNCTIONS.iter().any(|function| name == function),
        _ => false,
    })
}

/// Returns the generic parameters without bounds, for the declaration of a struct.
fn without_bounds(mut generics: Generics) -> Generics {
    generics.where_clause = None;
    for param in generics.type_params_mut() {
        param.bounds.clear();
        param.colon_token = None;
    }
    generics
}

/// Returns the fields of a struct that uses these type parameters and cannot be constructed.
fn phantom(generics: &Generics) -> TokenStream {
    let types = generics.type_params().map(|param| &param.ident);
    quote! {
        {
            __never: ::core::convert::Infallible,
            __types: ::core::marker::PhantomData<fn() -> (#(#types,)*)>,
        }
    }
}
