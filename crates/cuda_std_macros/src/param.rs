//! Expands `#[derive(KernelParam)]`: structs as parameters of a kernel.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{Data, DeriveInput, Error, Fields, Ident, Result, Type, Visibility};

/// Generates the struct's `KernelParam` impl and `NameArgs`, the struct of its host values.
pub fn derive(input: &DeriveInput) -> Result<TokenStream> {
    let fields = match &input.data {
        Data::Struct(data) => &data.fields,
        _ => return Err(Error::new_spanned(&input.ident, "KernelParam is derived for structs")),
    };
    let Fields::Named(named) = fields else {
        return Err(Error::new_spanned(&input.ident, "KernelParam needs named fields"));
    };
    check_layout(input)?;
    let names: Vec<&Ident> = named.named.iter().filter_map(|field| field.ident.as_ref()).collect();
    let types: Vec<&Type> = named.named.iter().map(|field| &field.ty).collect();
    let (ident, vis) = (&input.ident, &input.vis);
    let abi = format_ident!("__{ident}Abi");
    let plain: Vec<Ident> = (0..names.len()).map(|index| format_ident!("P{index}")).collect();
    let values: Vec<Ident> = (0..names.len()).map(|index| format_ident!("V{index}")).collect();
    let mut generics = input.generics.clone();
    for param in generics.type_params_mut() {
        param.bounds.extend::<[syn::TypeParamBound; 2]>([
            syn::parse_quote!(::core::marker::Copy),
            syn::parse_quote!('static),
        ]);
    }
    let (full, arguments, wheres) = generics.split_for_impl();
    let private = quote!(::cuda_std::__private);
    let host = host_values(ident, vis, &names, [&plain, &values]);
    Ok(quote! {
        #[doc(hidden)]
        #[allow(missing_docs)]
        #[derive(Clone, Copy)]
        #[repr(C)]
        #vis struct #abi<#(#plain),*> {
            #( #names: #plain, )*
        }
        // SAFETY: both structs are `repr(C)`, and each field has the same layout in both.
        unsafe impl #full #private::KernelParam for #ident #arguments #wheres {
            type Abi = #abi<#(<#types as #private::KernelParam>::Abi),*>;
            const IS_DEV_COMM: bool = false #( || <#types as #private::KernelParam>::IS_DEV_COMM )*;
            const HOLDS_SLICE: bool = false #( || <#types as #private::KernelParam>::HOLDS_SLICE )*;
            const MEMORY: &'static [#private::MemoryRef] = &[#(
                #private::MemoryRef::of_field(
                    stringify!(#names),
                    ::core::mem::offset_of!(Self, #names),
                    <#types as #private::KernelParam>::MEMORY,
                )
            ),*];
            const ENTRY: u8 = {
                #( assert!(
                    !<#types as #private::KernelParam>::STAYS,
                    "a GridConstant is a parameter of its own, not a field of one"
                ); )*
                #private::COPIED
            };
        }
        #host
    })
}

/// Returns the struct of a parameter's host values, with type parameters named `values`, which
/// converts into the plain struct with type parameters named `plain`.
fn host_values(
    ident: &Ident,
    vis: &Visibility,
    names: &[&Ident],
    [plain, values]: [&[Ident]; 2],
) -> TokenStream {
    let (abi, args) = (format_ident!("__{ident}Abi"), format_ident!("{ident}Args"));
    let private = quote!(::cuda_std::__private);
    let docs = format!("Host values for a kernel's parameter [`{ident}`].");
    quote! {
        #[cfg(not(target_arch = "nvptx64"))]
        #[doc = #docs]
        #[allow(missing_docs)]
        #[derive(Clone, Copy)]
        #vis struct #args<#(#values),*> {
            #( pub #names: #values, )*
        }
        // SAFETY: `info` describes all fields.
        #[cfg(not(target_arch = "nvptx64"))]
        unsafe impl<#(#plain,)* #(#values),*>
            #private::IntoArg<#abi<#(#plain),*>> for #args<#(#values),*>
        where
            #( #values: #private::IntoArg<#plain>, )*
        {
            fn into_arg(self) -> #abi<#(#plain),*> {
                #abi { #( #names: #private::IntoArg::into_arg(self.#names), )* }
            }

            fn info(&self) -> #private::ArgInfo<'_> {
                #private::ArgInfo::default()
                    #( .and(#private::IntoArg::info(&self.#names)) )*
            }

            fn windows(&self, see: &mut dyn FnMut(::core::ops::Range<u64>)) {
                #( #private::IntoArg::windows(&self.#names, see); )*
            }
        }
    }
}

/// Refuses a struct that is not laid out as the plain struct of its fields' `Abi` is.
fn check_layout(input: &DeriveInput) -> Result<()> {
    let mut is_repr_c = false;
    for attr in input.attrs.iter().filter(|attr| attr.path().is_ident("repr")) {
        attr.parse_nested_meta(|meta| {
            if !meta.path.is_ident("C") {
                return Err(meta.error("a kernel's parameter is #[repr(C)] alone"));
            }
            is_repr_c = true;
            Ok(())
        })?;
    }
    if is_repr_c {
        return Ok(());
    }
    let text = "a launch copies the struct as C lays it out: add #[repr(C)]";
    Err(Error::new_spanned(&input.ident, text))
}
