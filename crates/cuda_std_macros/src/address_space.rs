//! Expands `#[address_space(..)]` on a static.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Error, Ident, ItemStatic, Result, StaticMutability};

/// Expands `#[address_space(space)] item`.
pub fn expand(space: &Ident, item: &ItemStatic) -> Result<TokenStream> {
    match space.to_string().as_str() {
        "shared" => shared(item),
        // Statics are in global memory by default. A `constant` one is too: PTX's `.const` address
        // space is not used.
        "global" | "constant" => Ok(quote!(#item)),
        "local" => Err(Error::new_spanned(
            space,
            "a static in local memory is one a thread, which only a local variable can be: use \
             `let`",
        )),
        _ => Err(Error::new_spanned(space, "an address space is shared, global or constant")),
    }
}

fn shared(item: &ItemStatic) -> Result<TokenStream> {
    let ItemStatic { attrs, vis, static_token, mutability, ident, ty, expr, .. } = item;
    if !matches!(mutability, StaticMutability::Mut(_)) {
        let text =
            "shared memory has no contents at first, so that a static in it is a `static mut`";
        return Err(Error::new_spanned(ident, text));
    }
    Ok(quote! {
        #(#attrs)*
        #[cfg_attr(target_arch = "nvptx64", unsafe(link_section = ".shared"))]
        #vis #static_token mut #ident: ::cuda_std::shared::SharedStatic<#ty> =
            ::cuda_std::shared::SharedStatic::new(#expr);
    })
}
