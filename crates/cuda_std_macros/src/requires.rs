//! Generates the check of `#[kernel(requires(..))]`.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::{BinOp, Expr, ExprBinary, Ident, Type};

use crate::meta::token_text;

/// Returns `Kernel::check`: the conditions of `requires(..)`. They are in a const function, which
/// cannot use what only a running kernel has.
pub fn check(requires: &[Expr], names: &[&Ident], types: &[Type]) -> TokenStream {
    let private = quote!(::cuda_std::__private);
    let conditions = requires.iter().map(condition);
    let holds = types.iter().map(|ty| quote!({ <#ty as #private::KernelParam>::HOLDS_SLICE }));
    let holds: Vec<TokenStream> = holds.collect();
    quote! {
        fn check(
            grid: #private::Dim3,
            block: #private::Dim3,
            args: &<Self::Args as #private::KernelArgs>::Abi,
        ) -> ::core::result::Result<(), #private::Unmet> {
            #[allow(unused_variables, clippy::too_many_arguments)]
            const fn __conditions(
                grid: #private::Dim3,
                block: #private::Dim3,
                #( #names: <#types as #private::SeenAs<#holds>>::Value ),*
            ) -> ::core::result::Result<(), #private::Unmet> {
                #(#conditions)*
                ::core::result::Result::Ok(())
            }
            let (#(#names,)*) = *args;
            // SAFETY: a launch passes valid arguments.
            #( let #names = unsafe { #private::seen::<#types, #holds>(#names) }; )*
            __conditions(grid, block, #(#names),*)
        }
    }
}

/// Returns code that returns `Unmet` if the condition does not hold, with both sides of a
/// comparison.
fn condition(condition: &Expr) -> TokenStream {
    fn text(expr: &Expr) -> String {
        match expr {
            Expr::Binary(ExprBinary { left, op, right, .. }) => {
                format!("{} {} {}", text(left), op.to_token_stream(), text(right))
            }
            other => token_text(other.to_token_stream(), &[]),
        }
    }
    let unmet = |text: String, sides: TokenStream| {
        quote! {
            return ::core::result::Result::Err(::cuda_std::__private::Unmet {
                condition: #text,
                sides: #sides,
            });
        }
    };
    if let Expr::Binary(comparison) = condition
        && let (left, op, right) = (&comparison.left, &comparison.op, &comparison.right)
        && let BinOp::Lt(_) | BinOp::Le(_) | BinOp::Gt(_) | BinOp::Ge(_) | BinOp::Eq(_) = op
    {
        let sides = quote!(::core::option::Option::Some((left as i128, right as i128)));
        let unmet = unmet(text(condition), sides);
        return quote! {{
            let (left, right) = (#left, #right);
            if !(left #op right) { #unmet }
        }};
    }
    let unmet = unmet(text(condition), quote!(::core::option::Option::None));
    quote! { if !(#condition) { #unmet } }
}
