//! AMX: products of bytes on tile registers, for whole batches. Everything else is the AVX-512 table's.
//!
//! The compiler knows neither the instructions nor the registers, so that what one block of assembly leaves in a tile
//! register the next one finds; no compiled code and no function that is called between them touches any. Each block names
//! all of them as overwritten, which keeps it so should a compiler ever learn to use them.
#![allow(unsafe_code)]

mod missing;
#[cfg(test)]
mod model;
mod product;
mod tiles;
mod trial;

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __get_cpuid_max, _xgetbv};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;

use super::format::{Format, WeightRef};
use super::panel::{Bytes, Panel, Put, TILE_COLS, TILE_ROWS};
use super::{Isa, Kernels, TileKernel, avx512};
use missing::{Missing, Words};
use product::{product, takes};
use tiles::{Config, Sums, Tiles};

pub(super) fn table() -> Option<&'static Kernels> {
    missing().is_none().then_some(&TABLE)
}

static TABLE: Kernels = Kernels {
    isa: Isa::Amx,
    tiles: Some(TileKernel { takes: takes_somehow, few: 0, product: multiply }),
    ..avx512::WITH_VBMI
};

fn takes_somehow(format: Format) -> bool {
    takes(format) || (avx512::TILES.takes)(format)
}

/// On tile registers, or in vectors the formats that those do not take.
///
/// # Safety
/// As [`on_registers`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn multiply(w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put) {
    let product = if takes(w.format()) { on_registers } else { avx512::TILES.product };
    // SAFETY: by contract the processor has the instructions of both.
    unsafe { product(w, rows, x, put) }
}

/// Why this machine has no such table. Looks once: the permission is the process's, and is not taken back.
pub(super) fn missing() -> Option<Missing> {
    static MISSING: OnceLock<Option<Missing>> = OnceLock::new();
    *MISSING.get_or_init(|| {
        let vectors = avx512::has_vbmi().then_some(()).ok_or(Missing::Vectors);
        words().missing().map_or(vectors, Err).and_then(|()| permission()).and_then(|()| trial()).err()
    })
}

/// What the processor and the system say about tiles.
fn words() -> Words {
    // The functions have become safe in later versions of the standard library.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has the instruction; leaves past the last are not asked for.
    let leaf = |number: u32, sub: u32| unsafe { (number <= __get_cpuid_max(0).0).then(|| __cpuid_count(number, sub)) };
    let saves_by_xsave = leaf(1, 0).is_some_and(|leaf| leaf.ecx >> 27 & 1 == 1);
    Words {
        leaf7_edx: leaf(7, 0).map_or(0, |leaf| leaf.edx),
        palette_ebx: leaf(29, 1).map_or(0, |leaf| leaf.ebx),
        palette_ecx: leaf(29, 1).map_or(0, |leaf| leaf.ecx),
        // SAFETY: the bit just looked at says that the system lets programs execute the instruction.
        xcr0: if saves_by_xsave { unsafe { _xgetbv(0) } } else { 0 },
    }
}

/// Asks the system for room for tile registers, which it gives to a process and not to a thread.
fn permission() -> Result<(), Missing> {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: this system call reads and writes no memory of the program, and changes nothing in registers but its result
    // and the two that every call overwrites.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    if result == 0 { Ok(()) } else { Err(Missing::Refused(-result)) }
}

/// The trial product on this machine's tiles, which it must have and may use.
fn trial() -> Result<(), Missing> {
    // SAFETY: `missing` comes here only after the processor was seen to have it all and the system gave permission.
    trial::run(&|w, rows, x, put| unsafe { on_registers(w, rows, x, put) })
}

/// # Safety
/// The processor must have AMX and AVX-512 with VBMI, and the process permission for tile registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn on_registers(w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put) {
    // SAFETY: as this function's contract.
    let mut registers = unsafe { Registers::configure() };
    product(&mut registers, w, rows, x, put);
}

/// The tile registers of this thread, from their configuration until this is dropped.
struct Registers {
    /// No other thread has them.
    here: PhantomData<*mut ()>,
}

/// A block of assembly that may write every tile register, and neither flags nor the stack.
macro_rules! on_tiles {
    ($text:literal, [$($operand:tt)*], $($option:ident),*) => {
        asm!(
            $text,
            $($operand)*
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, $($option),*)
        )
    };
}

impl Registers {
    /// # Safety
    /// The processor must have AMX, and the process permission for tile registers.
    unsafe fn configure() -> Registers {
        static FULL: Config = Config::FULL;
        // SAFETY: by contract the instruction may be executed; it reads the 64 bytes of a configuration that is valid.
        unsafe { on_tiles!("ldtilecfg [{from}]", [from = in(reg) &raw const FULL,], readonly) };
        Registers { here: PhantomData }
    }
}

impl Registers {
    /// What is as large as a register, whatever its numbers.
    #[inline(always)]
    fn load<const T: usize, Rows>(&mut self, from: &Rows) {
        const { assert!(size_of::<Rows>() == TILE_ROWS * TILE_COLS) }
        // SAFETY: as in `zero`; the reference covers the 16 rows of 64 bytes that are read.
        unsafe {
            on_tiles!(
                "tileloadd tmm{t}, [{from} + {row}]",
                [t = const T, from = in(reg) from, row = in(reg) TILE_COLS,],
                readonly
            );
        }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: that there is such a value proves that the instruction may be executed; it touches tile registers only.
        unsafe { on_tiles!("tilerelease", [], nomem) };
    }
}

impl Tiles for Registers {
    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        // SAFETY: that there is such a value proves that the registers are configured; only they are touched.
        unsafe { on_tiles!("tilezero tmm{t}", [t = const T,], nomem) };
    }

    #[inline(always)]
    fn load_bytes<const T: usize>(&mut self, from: &Bytes) {
        self.load::<T, _>(from);
    }

    #[inline(always)]
    fn load_sums<const T: usize>(&mut self, from: &Sums) {
        self.load::<T, _>(from);
    }

    #[inline(always)]
    fn dot<const S: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: as in `zero`.
        unsafe { on_tiles!("tdpbssd tmm{s}, tmm{a}, tmm{b}", [s = const S, a = const A, b = const B,], nomem) };
    }

    #[inline(always)]
    fn store<const T: usize>(&mut self, to: &mut Sums) {
        // SAFETY: as in `zero`; the exclusive reference covers the 16 rows of 64 bytes that are written.
        unsafe {
            on_tiles!(
                "tilestored [{to} + {row}], tmm{t}",
                [t = const T, to = in(reg) to, row = in(reg) TILE_COLS,],
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first bytes of a function's code.
    fn code(function: *const ()) -> [u8; 24] {
        // SAFETY: functions are readable, and the text of this program is longer than any of them by far.
        unsafe { function.cast::<[u8; 24]>().read_unaligned() }
    }

    /// Where in its code an instruction stands that is encoded with a three-byte VEX prefix, map 0f38, no wide operand and
    /// no extension of the register field: its bytes from the second of the prefix on.
    #[track_caller]
    fn vex(function: *const (), prefix: u8, opcode: u8) -> Vec<u8> {
        let code = code(function);
        let found = code.windows(4).position(|w| w[0] == 0xc4 && w[1] & 0x9f == 0x82 && w[2..] == [prefix, opcode]);
        let at = found.unwrap_or_else(|| panic!("no c4 .. {prefix:02x} {opcode:02x} in {code:02x?}"));
        code[at + 1..].to_vec()
    }

    /// From the instructions' pages in the manual: opcode, mandatory prefix, and which operand is which field.
    #[test]
    #[expect(clippy::unusual_byte_groupings, reason = "the fields of an encoding")]
    fn encodings_are_those_of_the_manual() {
        #[inline(never)]
        fn dot(r: &mut Registers) {
            r.dot::<3, 5, 7>();
        }
        #[inline(never)]
        fn zero(r: &mut Registers) {
            r.zero::<3>();
        }
        #[inline(never)]
        fn load(r: &mut Registers, from: &Bytes) {
            r.load_bytes::<6>(from);
        }
        #[inline(never)]
        fn load_sums(r: &mut Registers, from: &Sums) {
            r.load_sums::<2>(from);
        }
        #[inline(never)]
        fn store(r: &mut Registers, to: &mut Sums) {
            r.store::<1>(to);
        }
        #[inline(never)]
        fn release(r: Registers) {
            drop(r);
        }
        #[inline(never)]
        unsafe fn configure() -> Registers {
            // SAFETY: as this function's contract.
            unsafe { Registers::configure() }
        }
        // tdpbssd: VEX.128.F2.0F38.W0 5E /r, sums in ModRM.reg, left operand in ModRM.rm, right in VEX.vvvv (inverted).
        assert_eq!(vex(dot as *const (), 0b0_1000_0_11, 0x5e)[..4], [0xe2, 0x43, 0x5e, 0b11_011_101]);
        // tilezero: VEX.128.F2.0F38.W0 49 11:rrr:000.
        assert_eq!(vex(zero as *const (), 0b0_1111_0_11, 0x49)[..4], [0xe2, 0x7b, 0x49, 0b11_011_000]);
        // tilerelease: VEX.128.NP.0F38.W0 49 C0.
        assert_eq!(vex(release as *const (), 0b0_1111_0_00, 0x49)[..4], [0xe2, 0x78, 0x49, 0xc0]);
        // tileloadd: VEX.128.F2.0F38.W0 4B !(11):rrr:100, and a second byte that has an index.
        for (function, tile) in [(load as *const (), 6), (load_sums as *const (), 2)] {
            let bytes = vex(function, 0b0_1111_0_11, 0x4b);
            assert_eq!((bytes[3] & 0x3f, bytes[3] >> 6 == 0b11), (tile << 3 | 0b100, false), "{bytes:02x?}");
            assert_ne!(bytes[4] >> 3 & 7, 0b100, "an index: {bytes:02x?}");
        }
        // tilestored: VEX.128.F3.0F38.W0 4B !(11):rrr:100, likewise.
        let bytes = vex(store as *const (), 0b0_1111_0_10, 0x4b);
        assert_eq!((bytes[3] & 0x3f, bytes[3] >> 6 == 0b11), (1 << 3 | 0b100, false), "{bytes:02x?}");
        // ldtilecfg: VEX.128.NP.0F38.W0 49 !(11):000:bbb.
        let bytes = vex(configure as *const (), 0b0_1111_0_00, 0x49);
        assert_eq!((bytes[3] >> 3 & 7, bytes[3] >> 6 == 0b11), (0, false), "{bytes:02x?}");
    }

    #[test]
    fn a_machine_without_says_why_and_has_no_table() {
        let Some(missing) = missing() else {
            assert!(Kernels::for_isa(Isa::Amx).is_some());
            return eprintln!("skipped: this machine has it");
        };
        assert!(Kernels::for_isa(Isa::Amx).is_none());
        assert!(Kernels::all_available().iter().all(|k| k.isa != Isa::Amx));
        assert_ne!(Kernels::best().isa, Isa::Amx);
        let flag = |name: &str| {
            let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            info.split_whitespace().any(|word| word == name)
        };
        // The system's own list is an independent witness.
        if !flag("amx_tile") && std::path::Path::new("/proc/cpuinfo").exists() {
            assert!(matches!(missing, Missing::Tiles | Missing::Disabled), "{missing:?}");
        }
    }
}
