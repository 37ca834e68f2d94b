// ldmatrix: 8×8 matrices of 16-bit elements from shared memory.
// Lane 8m + r gives the address of row r of matrix m.
// Rows are 16 bytes at multiples of 16.
// Addresses of lanes beyond the last matrix are not read.
//
// Register m of lane l holds a pair of matrix m:
//   plain:      row l/4, columns 2(l%4) and +1
//   transposed: rows 2(l%4) and +1, column l/4
// The lower column is in the low half.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 75
QG_DEVICE void ldmatrix_x1(u32 (&d)[1], const u8* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(d[0])
                 : "r"(shared_address(row))
                 : "memory");
}
QG_DEVICE void ldmatrix_x2(u32 (&d)[2], const u8* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(shared_address(row))
                 : "memory");
}
// `row` is an address from `shared_address`, so constant
// offsets fold into the instruction.
QG_DEVICE void ldmatrix_x4(u32 (&d)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row)
                 : "memory");
}
QG_DEVICE void ldmatrix_x4(u32 (&d)[4], const u8* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
}

QG_DEVICE void ldmatrix_x1_trans(u32 (&d)[1], const u8* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(d[0])
                 : "r"(shared_address(row))
                 : "memory");
}
QG_DEVICE void ldmatrix_x2_trans(u32 (&d)[2], const u8* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(shared_address(row))
                 : "memory");
}
QG_DEVICE void ldmatrix_x4_trans(u32 (&d)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row)
                 : "memory");
}
QG_DEVICE void ldmatrix_x4_trans(u32 (&d)[4], const u8* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared_address(row))
                 : "memory");
}
#endif
