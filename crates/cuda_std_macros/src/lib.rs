//! The macros of `cuda_std`: [`macro@kernel`], [`macro@KernelParam`], [`macro@address_space`],
//! [`print!`] and [`println!`].
//!
//! Use them through `cuda_std`, which re-exports them; the code they generate names `::cuda_std`,
//! and a kernel for GIN `::nccl_device`.
//!
//! # Safety model
//!
//! The macros add no unsafety of their own: the body of a kernel keeps the safety of the function
//! that it was written in. Every parameter is asserted to implement `KernelParam`, the unsafe trait
//! which says that the host's bytes are the device's.
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

mod address_space;
mod args;
mod generate;
mod instances;
mod meta;
mod param;
mod print;

use proc_macro::TokenStream;

/// Makes a function a GPU entry point, and on the host a launch item of the same name.
///
/// On nvptx64 the function becomes an `extern "ptx-kernel"` entry, and a record of it (name, file,
/// parameters) goes into the section that the builder reads. On the host the name becomes a
/// zero-sized value that implements `Kernel` (all that a launch needs) and `HostKernel` (the body,
/// for a simulator).
///
/// Since the host's item is a value of that name, no local variable in its scope can have the name.
///
/// # Arguments
///
/// * `T = [f32, f16, bf16]`: the instances of a generic kernel, one list for each type or const
///   parameter. Each combination becomes an entry `name_f32`, and the host's item is used as
///   `name::<f32>`. The body is compiled once an instance, with `T` as an alias, so
///   `shared_array![T; 32]` works in it.
/// * `B = gin`: the kernel is compiled for every back end of GIN, with `B` as one of the types of
///   `nccl_device::gin`. The entries are `name_proxy`, `name_gdaki`, `name_gpi` and `name_efa_gda`,
///   behind the values of the lists; the host's item has no such parameter, and a launch picks the
///   entry by the device communicator. On the host the body runs with `Proxy`.
/// * `arch = "sm_90a"`: the architecture that the kernel's file needs when it is not the build's
///   default.
/// * `max_threads = 256`: no launch has more threads per block. The compiler then uses as many
///   registers as that many threads can have, where it would else keep to what suits any block.
///   PTX: `.maxntid`.
///
/// # Errors
///
/// Does not compile: a kernel that is async, const, variadic or a method, that returns a value,
/// that takes a pattern other than a name, more than 12 parameters, a lifetime, a reference to
/// anything but a slice, a mutable one, or a generic parameter without a list; one for GIN that
/// takes no `DevComm`.
///
/// # Slices
///
/// A parameter `&[T]` is an address and a length. Nobody writes the elements while the kernel runs:
/// not the kernel through another pointer, not a peer, so never a window's memory. Results go out
/// through a `*mut T`.
#[proc_macro_attribute]
pub fn kernel(attr: TokenStream, item: TokenStream) -> TokenStream {
    let args = syn::parse_macro_input!(attr as args::KernelArgs);
    let function = syn::parse_macro_input!(item as syn::ItemFn);
    let source = meta::Source::of(proc_macro::Span::call_site());
    generate::kernel(args, function, &source)
        .unwrap_or_else(|error| error.to_compile_error())
        .into()
}

/// Makes a struct a parameter of a kernel: for kernels with many of them.
///
/// The struct is `#[repr(C)]`, and its fields are parameters too. A launch passes a `NameArgs` for
/// a `Name`: a struct with the same fields, each with what a launch passes for it.
///
/// ```text
/// #[repr(C)]
/// #[derive(Clone, Copy, KernelParam)]
/// pub struct Job { out: Window<f32>, count: usize, scale: f32 }
/// // scale_all::args(&dev, JobArgs { out: &window, count: 100, scale: 2.0 })
/// ```
#[proc_macro_derive(KernelParam)]
pub fn kernel_param(input: TokenStream) -> TokenStream {
    let input = syn::parse_macro_input!(input as syn::DeriveInput);
    param::derive(&input).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Puts a static into an address space of the GPU, with Rust-CUDA's name: `shared`, `global` or
/// `constant`.
///
/// `#[address_space(shared)] static mut TILE: [f32; 256] = [0.0; 256];` is an array of each block.
/// Its contents are undefined at first, whatever the initialiser says. `TILE[i]` and
/// `TILE.as_mut_ptr()` reach the elements; `&raw mut TILE` is a pointer to another type. The
/// simulator gives each block its own too, but does not see the accesses: those through the pointer
/// of `cuda_std`'s `shared_array!`, which is the same as an expression, it checks.
///
/// In `global` memory is every static; `constant` ones lie there too.
///
/// # Errors
///
/// Does not compile: another address space, and a shared static without `mut`.
#[proc_macro_attribute]
pub fn address_space(attr: TokenStream, item: TokenStream) -> TokenStream {
    let space = syn::parse_macro_input!(attr as syn::Ident);
    let item = syn::parse_macro_input!(item as syn::ItemStatic);
    address_space::place(&space, &item).unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Prints from a kernel, without a line end. See `println!`.
#[proc_macro]
pub fn print(input: TokenStream) -> TokenStream {
    let call = syn::parse_macro_input!(input as print::Print);
    call.expand("").unwrap_or_else(|error| error.to_compile_error()).into()
}

/// Prints a line from a kernel, for debugging.
///
/// Takes `{}` and `{name}` with numbers, `bool` and raw pointers, and no format options. On the GPU
/// the text goes through CUDA's printf buffer and appears when the host synchronises; on the host
/// it goes to the simulator.
#[proc_macro]
pub fn println(input: TokenStream) -> TokenStream {
    let call = syn::parse_macro_input!(input as print::Print);
    call.expand("\n").unwrap_or_else(|error| error.to_compile_error()).into()
}
