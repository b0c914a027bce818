//! The macros of `cuda_std`: [`macro@kernel`], [`print!`] and [`println!`].
//!
//! Use them through `cuda_std`, which re-exports them; the code they generate names `::cuda_std`.
//!
//! # Safety model
//!
//! The macros add no unsafety of their own: the body of a kernel keeps the safety of the function that it was written in.
//! Every parameter is asserted to implement `KernelParam`, the unsafe trait which says that the host's bytes are
//! the device's.
//!
//! # Example
//!
//! ```text
//! use cuda_std::prelude::*;
//!
//! #[kernel(T = [f32, f16, bf16])]
//! pub unsafe fn fill<T: Copy>(out: *mut T, value: T, count: usize) { /* .. */ }
//! // entries fill_f32, fill_f16, fill_bf16; on the host launch(fill::<f32>, ..)
//! ```

mod args;
mod generate;
mod instances;
mod meta;
mod print;

use proc_macro::TokenStream;

/// Makes a function a GPU entry point, and on the host a launch item of the same name.
///
/// On nvptx64 the function becomes an `extern "ptx-kernel"` entry, and a record of it (name, file, parameters) goes into
/// the section that the builder reads. On the host the name becomes a zero-sized value that implements `Kernel` (all that a
/// launch needs) and `HostKernel` (the body, for a simulator).
///
/// Since the host's item is a value of that name, no local variable in its scope can have the name.
///
/// # Arguments
///
/// * `T = [f32, f16, bf16]`: the instances of a generic kernel, one list for each type or const parameter. Each combination
///   becomes an entry `name_f32`, and the host's item is used as `name::<f32>`. The body is compiled once an instance, with
///   `T` as an alias, so `shared_array![T; 32]` works in it.
/// * `arch = "sm_90a"`: the architecture that the kernel's file needs when it is not the build's default.
///
/// # Errors
///
/// Does not compile: a kernel that is async, const, variadic or a method, that returns a value, that takes a pattern other
/// than a name, more than 12 parameters or a lifetime, or a generic parameter without a list.
#[proc_macro_attribute]
pub fn kernel(attr: TokenStream, item: TokenStream) -> TokenStream {
    let args = syn::parse_macro_input!(attr as args::KernelArgs);
    let function = syn::parse_macro_input!(item as syn::ItemFn);
    let source = meta::Source::of(proc_macro::Span::call_site());
    generate::kernel(args, function, &source)
        .unwrap_or_else(|error| error.to_compile_error())
        .into()
}

/// Prints from a kernel, without a line end. See `println!`.
#[proc_macro]
pub fn print(input: TokenStream) -> TokenStream {
    let call = syn::parse_macro_input!(input as print::Print);
    call.expand("").unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Prints a line from a kernel, for debugging.
///
/// Takes `{}` and `{name}` with numbers, `bool` and raw pointers, and no format options. On the GPU the text goes through
/// CUDA's printf buffer and appears when the host synchronises; on the host it goes to the simulator.
#[proc_macro]
pub fn println(input: TokenStream) -> TokenStream {
    let call = syn::parse_macro_input!(input as print::Print);
    call.expand("\n").unwrap_or_else(|error| error.to_compile_error()).into()
}
