//! Tensor cores, and `cp.async` copies.

use core::arch::asm;

use devcomm_types::{F8E4M3, F8E5M2};
use half::{bf16, f16};

use crate::tile::RegTile;
use crate::wgmma::Layout;

/// An address in shared memory.
pub(crate) type SharedAddress = u32;

instructions! { [pure nomem nostack]
    /// Returns the shared-memory address of a generic pointer.
    fn generic_to_shared(pointer: *const u8) -> SharedAddress:
        "{{ .reg .b64 a; cvta.to.shared.u64 a, {pointer}; cvt.u32.u64 {address}, a; }}",
        in(reg64: pointer), out(reg32: address) => address;
}

pub(crate) fn shared_address<T>(pointer: *const T) -> SharedAddress {
    generic_to_shared(pointer.cast())
}

pub(crate) fn shared_offset(address: SharedAddress, bytes: u32) -> SharedAddress {
    address + bytes
}

pub(crate) unsafe fn mma_m16n8k16<T: Factor>(d: &mut [f32; 4], a: [u32; 4], b: [u32; 2]) {
    macro_rules! mma {
        ($types:literal) => {
            asm!(
                concat!(
                    "mma.sync.aligned.m16n8k16.row.col.f32.", $types, ".f32 ",
                    "{{{}, {}, {}, {}}}, {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, ",
                    "{{{0}, {1}, {2}, {3}}};",
                ),
                inout(reg32) d[0],
                inout(reg32) d[1],
                inout(reg32) d[2],
                inout(reg32) d[3],
                a0 = in(reg32) a[0],
                a1 = in(reg32) a[1],
                a2 = in(reg32) a[2],
                a3 = in(reg32) a[3],
                b0 = in(reg32) b[0],
                b1 = in(reg32) b[1],
                options(nomem, nostack),
            )
        };
    }
    // SAFETY: the instruction accesses registers alone; the caller ensures that all lanes are here.
    unsafe {
        match T::FORMAT {
            Format::Bf16 => mma!("bf16.bf16"),
            Format::F16 => mma!("f16.f16"),
            // `mma::Factor` excludes these.
            Format::E4m3 | Format::E5m2 => {}
        }
    }
}

instructions! { [nostack]
    // All lanes of the warp take part. The caller passes the address of a row in shared memory,
    // which the warp may write if it stores.
    unsafe fn load_matrices_straight(row: SharedAddress) -> [u32; 4]:
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{a}, {b}, {c}, {d}}}, [{row}];",
        in(reg32: row), out(reg32: a b c d) => [a, b, c, d];
    unsafe fn load_matrices_transposed(row: SharedAddress) -> [u32; 4]:
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{a}, {b}, {c}, {d}}}, [{row}];",
        in(reg32: row), out(reg32: a b c d) => [a, b, c, d];
    unsafe fn store_matrices(row: SharedAddress, [a, b, c, d]: [u32; 4]):
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{row}], {{{a}, {b}, {c}, {d}}};",
        in(reg32: row a b c d);
    unsafe fn store_four_transposed(row: SharedAddress, [a, b, c, d]: [u32; 4]):
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{row}], {{{a}, {b}, {c}, {d}}};",
        in(reg32: row a b c d);
    unsafe fn store_two_transposed(row: SharedAddress, [a, b]: [u32; 2]):
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{row}], {{{a}, {b}}};",
        in(reg32: row a b);

    // The caller keeps both addresses valid and aligned until the copy is waited for. Of the
    // source, `bytes` bytes are read, and the rest is zeros.
    unsafe fn copy_16_bytes(to: SharedAddress, from: *const u8, bytes: u32):
        "cp.async.cg.shared.global [{to}], [{from}], 16, {bytes};",
        in(reg32: to bytes; reg64: from);
    unsafe fn copy_4_bytes(to: SharedAddress, from: *const u8, bytes: u32):
        "cp.async.ca.shared.global [{to}], [{from}], 4, {bytes};",
        in(reg32: to bytes; reg64: from);

    fn commit_copies(): "cp.async.commit_group;";
    fn wgmma_fence(): "wgmma.fence.sync.aligned;";
    fn wgmma_commit(): "wgmma.commit_group.sync.aligned;";
}

const_instructions! {
    wait_copies "cp.async.wait_group {};";
    wgmma_wait "wgmma.wait_group.sync.aligned {};";
}

pub(crate) unsafe fn load_matrices<const TRANSPOSED: bool>(row: SharedAddress) -> [u32; 4] {
    // SAFETY: the caller passes the address of a row in shared memory, and all lanes take part.
    unsafe { if TRANSPOSED { load_matrices_transposed(row) } else { load_matrices_straight(row) } }
}

pub(crate) unsafe fn store_matrices_transposed<const N: usize>(
    row: SharedAddress,
    words: [u32; N],
) {
    // SAFETY: the caller passes the address of a row in shared memory that this warp may write.
    unsafe {
        if N == 4 {
            store_four_transposed(row, [words[0], words[1], words[2], words[3]]);
        } else {
            store_two_transposed(row, [words[0], words[1]]);
        }
    }
}

pub(crate) unsafe fn copy_16_async(to: SharedAddress, from: *const u8, pred: bool) {
    // SAFETY: the caller keeps both addresses valid and aligned until the copy is waited for.
    unsafe { copy_16_bytes(to, from, if pred { 16 } else { 0 }) }
}

pub(crate) unsafe fn copy_4_async(to: SharedAddress, from: *const u8, pred: bool) {
    // SAFETY: the caller keeps both addresses valid and aligned until the copy is waited for.
    unsafe { copy_4_bytes(to, from, if pred { 4 } else { 0 }) }
}

/// The low word of a matrix descriptor of `wgmma`. Bits 0 to 13 are the low 18 bits of the address
/// in units of 16 bytes; bits 16 to 29 are the leading offset, which only MN-major tiles have. An
/// offset that is added carries nothing, as shared memory ends below byte 2^18. The high word is
/// the same for all tiles: a stride of 1,024 bytes per eight rows of memory, and the 128-byte
/// swizzle.
pub(crate) type TileAddress = u32;

const EIGHT_ROWS: u32 = 1024 >> 4;
const SWIZZLE_128B: u32 = 1 << 30;

pub(crate) fn tile_address(address: SharedAddress) -> TileAddress {
    // In a cluster, higher bits are the block's rank.
    (address & 0x3_ffff) >> 4
}

/// Returns a descriptor for MN-major tiles. PTX's canonical layout for the 128-byte swizzle and
/// elements of 16 bits is `((8, 8, m), (8, k)) : ((1, 8, LBO), (64, SBO))`: 64 elements of a term
/// in 128 bytes, eight terms in 1,024 (SBO, as in [`tile_address`]), the next 64 rows of the factor
/// at LBO, which only these tiles have.
pub(crate) fn transposed_tile_address(address: SharedAddress, next_rows: u32) -> TileAddress {
    // It is opaque, so that LLVM computes nothing from it ahead of a branch to this layout.
    tile_address(super::opaque(address)) | ((next_rows & 0x3_ffff) >> 4) << 16
}

pub(crate) fn tile_offset_bytes(tile: TileAddress, bytes: u32) -> TileAddress {
    tile + (bytes >> 4)
}

#[doc(hidden)]
pub enum Format {
    Bf16,
    F16,
    E4m3,
    E5m2,
}

/// An element type of the factors of `wgmma`: `bf16`, `f16`, `F8E4M3` or `F8E5M2`.
pub trait Factor: Copy {
    /// Terms of a product: 32 bytes of a row.
    const TERMS: u32 = 32 / size_of::<Self>() as u32;
    #[doc(hidden)]
    const FORMAT: Format;
}

impl Factor for bf16 {
    const FORMAT: Format = Format::Bf16;
}

impl Factor for f16 {
    const FORMAT: Format = Format::F16;
}

impl Factor for F8E4M3 {
    const FORMAT: Format = Format::E4m3;
}

impl Factor for F8E5M2 {
    const FORMAT: Format = Format::E5m2;
}

/// The sums of `wgmma` in a thread's registers: `N / 2` of them for 64 x `N` of a warpgroup.
pub trait Sums {
    /// No products added yet.
    const ZERO: Self;
    #[doc(hidden)]
    unsafe fn wgmma<T: Factor, LA: Layout<T>, LB: Layout<T>>(
        &mut self,
        a: TileAddress,
        b: TileAddress,
        accumulate: bool,
    );
    #[doc(hidden)]
    fn fence_operand(&mut self);
}

macro_rules! wgmma {
    ($sums:literal $shape:literal: $first:literal $($i:literal)*) => {
        impl Sums for [f32; $sums] {
            const ZERO: Self = [0.0; $sums];

            unsafe fn wgmma<T: Factor, LA: Layout<T>, LB: Layout<T>>(
                &mut self,
                a: TileAddress,
                b: TileAddress,
                accumulate: bool,
            ) {
                let accumulate = u32::from(accumulate);
                // SAFETY: it reads tiles that the caller keeps valid, and adds to registers.
                unsafe {
                    // The last two numbers say whether 16-bit factors are transposed.
                    match T::FORMAT {
                        Format::Bf16 => wgmma!(
                            @asm $shape "k16.f32.bf16.bf16" ", {ta}, {tb}" self a b accumulate
                            (ta = const LA::TRANSPOSED as u32, tb = const LB::TRANSPOSED as u32,)
                            $first $($i)*
                        ),
                        Format::F16 => wgmma!(
                            @asm $shape "k16.f32.f16.f16" ", {ta}, {tb}" self a b accumulate
                            (ta = const LA::TRANSPOSED as u32, tb = const LB::TRANSPOSED as u32,)
                            $first $($i)*
                        ),
                        Format::E4m3 => wgmma!(
                            @asm $shape "k32.f32.e4m3.e4m3" "" self a b accumulate ()
                            $first $($i)*
                        ),
                        Format::E5m2 => wgmma!(
                            @asm $shape "k32.f32.e5m2.e5m2" "" self a b accumulate ()
                            $first $($i)*
                        ),
                    }
                }
            }

            fn fence_operand(&mut self) {
                // SAFETY: the assembly is empty. The compiler assumes that registers change.
                unsafe {
                    asm!(
                        concat!("// {", $first, "}" $(, " {", $i, "}")*),
                        inout(reg32) self[$first],
                        $( inout(reg32) self[$i], )*
                        options(nostack),
                    );
                }
            }
        }

        impl Sums for RegTile<f32, { $sums / 4 }> {
            const ZERO: Self = Self::filled(0.0);

            unsafe fn wgmma<T: Factor, LA: Layout<T>, LB: Layout<T>>(
                &mut self,
                a: TileAddress,
                b: TileAddress,
                accumulate: bool,
            ) {
                // SAFETY: the caller's warpgroup calls this together, with tiles in shared memory
                // that no thread writes.
                unsafe { self.elements_mut::<$sums>().wgmma::<T, LA, LB>(a, b, accumulate) }
            }

            fn fence_operand(&mut self) {
                self.elements_mut::<$sums>().fence_operand();
            }
        }
    };
    (
        @asm $shape:literal $types:literal $transposed:literal
        $d:ident $a:ident $b:ident $accumulate:ident ($($immediates:tt)*)
        $first:literal $($i:literal)*
    ) => {
        asm!(
            concat!(
                "{{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, {accumulate}, 0; ",
                "mov.b64 a, {{{a}, {high}}}; mov.b64 b, {{{b}, {high}}}; ",
                "wgmma.mma_async.sync.aligned.", $shape, $types, " {{",
                "{", $first, "}" $(, ", {", $i, "}")*,
                "}}, a, b, p, 1, 1", $transposed, "; }}",
            ),
            inout(reg32) $d[$first],
            $( inout(reg32) $d[$i], )*
            a = in(reg32) $a,
            b = in(reg32) $b,
            high = const EIGHT_ROWS | SWIZZLE_128B,
            accumulate = in(reg32) $accumulate,
            $($immediates)*
            options(nostack),
        )
    };
}

/// Sums of all widths: each has the registers of the one before and some more. The shapes are those
/// of `wgmma`; `1, 1` in the instruction means that neither factor is negated.
macro_rules! widths {
    ([$($before:literal)*]) => {};
    ([$($before:literal)*] $sums:literal $shape:literal: $($more:literal)*; $($wider:tt)*) => {
        wgmma! { $sums $shape: $($before)* $($more)* }
        widths! { [$($before)* $($more)*] $($wider)* }
    };
}

#[rustfmt::skip]
widths! { []
    4 "m64n8": 0 1 2 3;
    8 "m64n16": 4 5 6 7;
    16 "m64n32": 8 9 10 11 12 13 14 15;
    24 "m64n48": 16 17 18 19 20 21 22 23;
    32 "m64n64": 24 25 26 27 28 29 30 31;
    40 "m64n80": 32 33 34 35 36 37 38 39;
    48 "m64n96": 40 41 42 43 44 45 46 47;
    56 "m64n112": 48 49 50 51 52 53 54 55;
    64 "m64n128": 56 57 58 59 60 61 62 63;
    72 "m64n144": 64 65 66 67 68 69 70 71;
    80 "m64n160": 72 73 74 75 76 77 78 79;
    88 "m64n176": 80 81 82 83 84 85 86 87;
    96 "m64n192": 88 89 90 91 92 93 94 95;
    104 "m64n208": 96 97 98 99 100 101 102 103;
    112 "m64n224": 104 105 106 107 108 109 110 111;
    128 "m64n256": 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127;
}
