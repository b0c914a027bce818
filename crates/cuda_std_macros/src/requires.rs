//! Generates the check of `#[kernel(requires(..))]`.

use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::spanned::Spanned;
use syn::{BinOp, Error, Expr, ExprBinary, ExprGroup, ExprParen, Ident, Result, Type};

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
            // SAFETY: by `KernelParam`'s contract the bytes of any `Abi` are a valid parameter; one
            // that holds a slice is seen as its `Abi`.
            #( let #names = unsafe { #private::seen::<#types, #holds>(#names) }; )*
            __conditions(grid, block, #(#names),*)
        }
    }
}

/// Refuses parameters with the names of the launch's grid and block, which conditions use.
pub fn check_names(requires: &[Expr], names: &[&Ident]) -> Result<()> {
    let taken = names.iter().find(|name| **name == "grid" || **name == "block");
    match taken {
        Some(name) if !requires.is_empty() => {
            let text = format!("in `requires`, `{name}` is the launch's: rename the parameter");
            Err(Error::new(name.span(), text))
        }
        _ => Ok(()),
    }
}

/// Returns code that returns `Unmet` if the condition does not hold, with both sides of a
/// comparison of integers.
fn condition(condition: &Expr) -> TokenStream {
    let condition = in_parentheses(condition);
    let text = text(condition);
    let unmet = |sides: TokenStream| {
        quote! {
            return ::core::result::Result::Err(::cuda_std::__private::Unmet {
                condition: #text,
                sides: #sides,
            })
        }
    };
    let without_sides = unmet(quote!(::core::option::Option::None));
    match condition {
        Expr::Binary(ExprBinary { left, op: BinOp::And(_), right, .. }) => {
            [left, right].map(|part| self::condition(part)).into_iter().collect()
        }
        Expr::Binary(ExprBinary { left, op, right, .. }) if is_comparison(op) => {
            let mut operands = vec![];
            let [plain_left, exact_left] = arithmetic(left, &without_sides, &mut operands);
            let [plain_right, exact_right] = arithmetic(right, &without_sides, &mut operands);
            let (names, values): (Vec<_>, Vec<_>) = operands.into_iter().unzip();
            let first = &names[0];
            let with_sides = unmet(quote!(::core::option::Option::Some((left, right))));
            quote! {{
                let (#(#names,)*) = (#(#values,)*);
                if let ::core::option::Option::Some(range) =
                    ::cuda_std::__private::range_of(&#first)
                {
                    let (left, right) = (#exact_left, #exact_right);
                    if !(left #op right) { #with_sides }
                } else if !(#plain_left #op #plain_right) {
                    #without_sides
                }
            }}
        }
        _ => quote! { if !(#condition) { #without_sides } },
    }
}

/// Returns code of an expression of numbers, and code of its value as an `i128`: one that leaves
/// the type's `range` on the way is `unmet`. Both name variables for the operands, which are added
/// to `operands`.
fn arithmetic<'a>(
    expr: &'a Expr,
    unmet: &TokenStream,
    operands: &mut Vec<(Ident, &'a Expr)>,
) -> [TokenStream; 2] {
    let expr = in_parentheses(expr);
    if let Expr::Binary(ExprBinary { left, op, right, .. }) = expr
        && let Some(checked) = checked(op)
    {
        let [plain_left, exact_left] = arithmetic(left, unmet, operands);
        let [plain_right, exact_right] = arithmetic(right, unmet, operands);
        let exact = quote! {
            match i128::#checked(#exact_left, #exact_right) {
                ::core::option::Option::Some(value)
                    if range.0 <= value && value <= range.1 => value,
                _ => #unmet,
            }
        };
        return [quote!((#plain_left #op #plain_right)), exact];
    }
    let name = format_ident!("__{}", operands.len(), span = expr.span());
    operands.push((name.clone(), expr));
    [quote!(#name), quote!(#name as i128)]
}

/// Returns what is in parentheses, or in the invisible ones around a macro's fragment.
fn in_parentheses(expr: &Expr) -> &Expr {
    match expr {
        Expr::Paren(ExprParen { expr, .. }) | Expr::Group(ExprGroup { expr, .. }) => {
            in_parentheses(expr)
        }
        other => other,
    }
}

fn is_comparison(op: &BinOp) -> bool {
    use BinOp::{Eq, Ge, Gt, Le, Lt, Ne};
    matches!(op, Lt(_) | Le(_) | Gt(_) | Ge(_) | Eq(_) | Ne(_))
}

/// Returns the function of integers that does the same, if it can overflow.
fn checked(op: &BinOp) -> Option<Ident> {
    let name = match op {
        BinOp::Add(_) => "add",
        BinOp::Sub(_) => "sub",
        BinOp::Mul(_) => "mul",
        BinOp::Div(_) => "div",
        BinOp::Rem(_) => "rem",
        _ => return None,
    };
    Some(format_ident!("checked_{name}"))
}

/// Returns the condition as in the source.
fn text(expr: &Expr) -> String {
    match expr {
        Expr::Binary(ExprBinary { left, op, right, .. }) => {
            format!("{} {} {}", text(left), op.to_token_stream(), text(right))
        }
        other => token_text(other.to_token_stream(), &[]),
    }
}
