//! The layout of the dynamic shared memory.

/// The maximum dynamic shared memory of a block in bytes, on GPUs since Hopper.
const MAX_BYTES: u32 = 227 << 10;

/// Returns the offset of array `index` among arrays of these sizes that lie one after the other.
#[doc(hidden)]
#[must_use]
pub const fn offset(sizes: &[u32], index: usize) -> u32 {
    let (mut at, mut i) = (0, 0);
    while i < index {
        at += sizes[i];
        i += 1;
    }
    at
}

/// Returns the dynamic shared memory, in bytes, that a launch needs for arrays of these sizes.
///
/// # Panics
///
/// When that is more than a block can have.
#[doc(hidden)]
#[must_use]
pub const fn bytes(sizes: &[u32]) -> u32 {
    let bytes = offset(sizes, sizes.len()) + super::TileMemory::PADDING;
    assert!(bytes <= MAX_BYTES, "a block has at most 227 KiB of shared memory");
    bytes
}

/// Divides the dynamic shared memory of a block, at compile time, into arrays of
/// [`SharedTile`](crate::tile::SharedTile)s.
///
/// The type has the constant `BYTES`, the dynamic shared memory of a launch, and a function
/// `dynamic`, which returns the block's memory. For each array it has a method of its name, which
/// returns the tile of an index. The index is checked in builds with debug assertions. Arrays that
/// do not fit in the 227 KiB of a block, as in the second example, are an error of the compiler.
///
/// ```
/// use cuda_std::bf16;
/// use cuda_std::tile::SharedTile;
///
/// const STAGES: u32 = 4;
///
/// cuda_std::arena! {
///     /// The shared memory of a block.
///     pub struct Memory {
///         /// The rows of A of each stage.
///         a: [SharedTile<bf16, 128>; STAGES],
///         /// What each of four warps stores.
///         stores: [SharedTile<bf16, 16>; 4],
///     }
/// }
///
/// // 4 tiles of 16 KiB, 4 of 2 KiB, and at most 1 KiB that aligns the first one.
/// assert_eq!(Memory::BYTES, 73 << 10);
///
/// /// Returns the tile of A in a stage.
/// fn stage(memory: Memory, stage: u32) -> SharedTile<bf16, 128> {
///     memory.a(stage)
/// }
/// ```
///
/// ```compile_fail
/// cuda_std::arena! {
///     struct Memory {
///         a: [cuda_std::tile::SharedTile<f32, 256>; 8],
///     }
/// }
/// let bytes = Memory::BYTES;
/// ```
#[macro_export]
macro_rules! arena {
    ($(#[$meta:meta])* $vis:vis struct $name:ident {
        $($(#[$attribute:meta])* $array:ident: [$tile:ty; $count:expr]),+ $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        $vis struct $name($crate::tile::TileMemory);

        impl $name {
            /// The dynamic shared memory of a launch, in bytes.
            $vis const BYTES: u32 = $crate::tile::arena::bytes(&Self::SIZES);
            const SIZES: [u32; [$(stringify!($array)),+].len()] =
                [$($count * <$tile>::BYTES),+];

            /// Returns the block's memory.
            #[must_use]
            $vis fn dynamic() -> Self {
                Self($crate::tile::TileMemory::dynamic())
            }

            $crate::arena!(@arrays 0, $($(#[$attribute])* $array: [$tile; $count],)+);
        }
    };
    (@arrays $index:expr,) => {};
    (@arrays $index:expr, $(#[$doc:meta])* $array:ident: [$tile:ty; $count:expr], $($rest:tt)*) => {
        $(#[$doc])*
        #[must_use]
        fn $array(self, index: u32) -> $tile {
            // Computes `BYTES`, which fails if the arrays do not fit.
            const { assert!(Self::BYTES > 0) };
            debug_assert!(index < $count, "the array has fewer tiles");
            let first = const { $crate::tile::arena::offset(&Self::SIZES, $index) };
            self.0.tile(first + index * <$tile>::BYTES).with_its_rows()
        }
        $crate::arena!(@arrays $index + 1, $($rest)*);
    };
}
